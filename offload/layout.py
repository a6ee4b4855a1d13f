"""A module as one flat buffer: where its stored bytes lie in a slot, and how parameters are bound to them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from offload.checkpoint import TensorEntry
from offload.names import Recipe

BLOCK_BYTES = 4096  # what O_DIRECT asks of file offsets, lengths and addresses


@dataclass(frozen=True)
class Extent:
    """`nbytes` at `offset` of `file` go to `slot_offset` of the buffer; all are multiples of BLOCK_BYTES.

    The last block may reach past the end of the file.
    """

    file: Path
    offset: int
    nbytes: int
    slot_offset: int


@dataclass(frozen=True)
class Unit:
    """Parameters that are read and used together: a decoder layer, the embedding, the head."""

    name: str
    recipes: tuple[Recipe, ...]
    extents: tuple[Extent, ...]
    direct: frozenset[str]  # parameters that can be views of the stored bytes
    parameter_bytes: int
    workspace_bytes: int  # of the parameters that cannot be views
    signature: tuple  # units of one signature can take turns in the same slots and workspace

    @property
    def slot_bytes(self) -> int:
        """Size of a buffer for the unit as it is stored."""
        return sum(extent.nbytes for extent in self.extents)

    @property
    def resident_bytes(self) -> int:
        """What the unit costs where it stays: its stored bytes, unless other bytes are made of them."""
        return self.parameter_bytes if self.workspace_bytes else self.slot_bytes


def make_unit(name: str, model: PreTrainedModel, recipes: Iterable[Recipe]) -> Unit:
    """The unit of `recipes`, for the shapes and types that `model`, a skeleton, declares."""
    recipes = tuple(recipes)
    targets = {t: model.get_parameter_or_buffer(t) for recipe in recipes for t in recipe.targets}
    direct = frozenset(recipe.targets[0] for recipe in recipes if _is_direct(recipe, targets[recipe.targets[0]]))
    sizes = {target: _padded(tensor.nbytes, 64) for target, tensor in targets.items()}
    prefix = f"{name}."
    return Unit(
        name,
        recipes,
        _extents([entry for recipe in recipes for entry in recipe.sources]),
        direct,
        sum(sizes.values()),
        sum(size for target, size in sizes.items() if target not in direct),
        tuple((t.removeprefix(prefix), tuple(x.shape), x.dtype, t in direct) for t, x in sorted(targets.items())),
    )


@dataclass(frozen=True)
class Slots:
    """Which slot each streamed unit uses, and what the slots and shared workspaces of all signatures take."""

    slot_of: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    workspace_bytes: dict[tuple, int]


def assign_slots(units: Sequence[Unit], num_slots: int) -> Slots:
    """Units of one signature take turns in `num_slots` slots; one of another size never shares with them."""
    slot_of: list[int] = []
    sizes: list[int] = []
    groups: dict[tuple, list[int]] = {}
    turns: dict[tuple, int] = {}
    for unit in units:
        turn = turns.get(unit.signature, 0)
        turns[unit.signature] = turn + 1
        group = groups.setdefault(unit.signature, [])
        if len(group) < num_slots:
            group.append(len(sizes))
            sizes.append(0)
        slot = group[turn % num_slots]
        sizes[slot] = max(sizes[slot], unit.slot_bytes)
        slot_of.append(slot)
    workspaces = {unit.signature: unit.workspace_bytes for unit in units if unit.workspace_bytes}
    return Slots(tuple(slot_of), tuple(sizes), workspaces)


def bind(
    unit: Unit, model: PreTrainedModel, buffer: torch.Tensor, workspace: torch.Tensor | None, *, views: bool = True
) -> "Binding":
    """Points the unit's parameters at `buffer` where they can be views, else at `workspace`; both are uint8.

    With `views` false all of them go to the workspace, and the buffer can be dropped once they are filled.
    """
    copies: list[tuple[torch.Tensor, TensorEntry, torch.Tensor]] = []
    conversions: list[tuple[Recipe, list[torch.Tensor], dict[str, torch.Tensor]]] = []
    offsets = _slot_offsets(unit)
    used = 0
    for recipe in sorted(unit.recipes, key=lambda recipe: recipe.targets):
        raw = [buffer.narrow(0, offsets[entry.name], entry.nbytes) for entry in recipe.sources]
        if views and recipe.targets[0] in unit.direct:
            put(model, recipe.targets[0], typed(raw[0], recipe.sources[0]))
            continue
        made: dict[str, torch.Tensor] = {}
        for name in recipe.targets:
            declared = model.get_parameter_or_buffer(name)
            made[name] = workspace.narrow(0, used, declared.nbytes).view(declared.dtype).view(declared.shape)
            used += _padded(declared.nbytes, 64)
            put(model, name, made[name])
        regions = recipe.regions(made[recipe.targets[0]])
        if regions is None:
            conversions.append((recipe, raw, made))
        else:
            copies.extend(zip(regions, recipe.sources, raw, strict=True))
    holds_views = views and bool(unit.direct)
    return Binding(model, copies, conversions, holds_views)


@dataclass(frozen=True)
class Binding:
    """What is left to do, once a unit's bytes are in its buffer, before its module can run."""

    model: PreTrainedModel
    copies: list[tuple[torch.Tensor, TensorEntry, torch.Tensor]]
    conversions: list[tuple[Recipe, list[torch.Tensor], dict[str, torch.Tensor]]]
    holds_views: bool  # if not, the buffer is free as soon as the unit is materialized

    def materialize(self) -> None:
        """Fills the parameters that are not views: casts, fused experts, transformers' conversions."""
        with torch.no_grad():
            for region, entry, raw in self.copies:
                region.copy_(typed(raw, entry))
            for recipe, raw, made in self.conversions:
                sources = [typed(piece, entry) for piece, entry in zip(raw, recipe.sources, strict=True)]
                for name, tensor in recipe.convert(self.model, sources).items():
                    made[name].copy_(tensor)


def typed(raw: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Bytes as the stored tensor: a view, or a copy where the file left them unaligned for their type."""
    aligned = raw if raw.storage_offset() % entry.dtype.itemsize == 0 else raw.clone()
    return aligned.view(entry.dtype).view(entry.shape)


def put(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    """Makes `tensor` the parameter or buffer `name`; unlike assigning `.data` this also leaves the meta device."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    setattr(module, leaf, tensor)


def _is_direct(recipe: Recipe, target: torch.Tensor) -> bool:
    entry = recipe.sources[0]
    return recipe.converter is None and entry.dtype == target.dtype and entry.offset % entry.dtype.itemsize == 0


def _extents(entries: Sequence[TensorEntry]) -> tuple[Extent, ...]:
    """Block-aligned ranges that cover `entries`, those that touch being one."""
    extents: list[Extent] = []
    slot_offset = 0
    for entry in sorted(entries, key=lambda entry: (entry.file, entry.offset)):
        begin = entry.offset // BLOCK_BYTES * BLOCK_BYTES
        end = _padded(entry.offset + entry.nbytes, BLOCK_BYTES)
        last = extents[-1] if extents else None
        if last and last.file == entry.file and begin <= last.offset + last.nbytes:
            end = max(end, last.offset + last.nbytes)
            extents[-1] = Extent(last.file, last.offset, end - last.offset, last.slot_offset)
        else:
            extents.append(Extent(entry.file, begin, end - begin, slot_offset))
        slot_offset = extents[-1].slot_offset + extents[-1].nbytes
    return tuple(extents)


def _slot_offsets(unit: Unit) -> dict[str, int]:
    """Where in the unit's buffer each stored tensor begins."""
    offsets: dict[str, int] = {}
    for entry in (entry for recipe in unit.recipes for entry in recipe.sources):
        for extent in unit.extents:
            if extent.file == entry.file and extent.offset <= entry.offset < extent.offset + extent.nbytes:
                offsets[entry.name] = extent.slot_offset + entry.offset - extent.offset
                break
    return offsets


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
