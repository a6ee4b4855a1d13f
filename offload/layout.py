"""A module as one flat buffer: where its stored bytes lie in a slot, and how parameters are bound to them."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from offload.entries import TensorEntry
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
    workspace_bytes: int  # of the parameters that are neither
    signature: tuple  # units of one signature can take turns in the same slots and workspace
    packed: frozenset[str] = frozenset()  # matrices that are made only while the module that owns them computes
    unpacked_bytes: int = 0  # of the packed ones that exist at one time, at most

    @property
    def slot_bytes(self) -> int:
        """Size of a buffer for the unit as it is stored."""
        return sum(extent.nbytes for extent in self.extents)

    @property
    def resident_bytes(self) -> int:
        """What the unit costs where it stays: its stored bytes, unless other bytes are made of them."""
        if self.packed:
            return self.slot_bytes + self.workspace_bytes
        return self.plain_bytes

    @property
    def plain_bytes(self) -> int:
        """What the unit costs where it stays with nothing packed."""
        return self.parameter_bytes if self.packed or self.workspace_bytes else self.slot_bytes

    @property
    def is_encoded(self) -> bool:
        """Whether what is stored are codes, not numbers."""
        return any(entry.encoding is not None for recipe in self.recipes for entry in recipe.sources)

    @property
    def rounded_bytes(self) -> int:
        """What the unit costs where it stays with other values than those stored: codes have to be decoded for it."""
        return self.plain_bytes if self.is_encoded else self.resident_bytes


def make_unit(name: str, model: PreTrainedModel, recipes: Iterable[Recipe], *, may_pack: bool = False) -> Unit:
    """The unit of `recipes`, for the shapes and types that `model`, a skeleton, declares.

    `may_pack`: matrices that take fewer bytes as they are stored stay so until the module that owns them is called.
    """
    recipes = tuple(recipes)
    targets = {t: model.get_parameter_or_buffer(t) for recipe in recipes for t in recipe.targets}
    direct = frozenset(recipe.targets[0] for recipe in recipes if _is_direct(recipe, targets[recipe.targets[0]]))
    packed = {
        target
        for recipe in recipes
        for target in recipe.targets
        if may_pack
        and targets[target].dim() > 1
        and recipe.grows_to(targets[target].dtype)
        and len(recipe.targets) == 1
    }
    sizes = {target: _padded(tensor.nbytes, 64) for target, tensor in targets.items()}
    owners = {target.rpartition(".")[0] for target in packed}
    prefix = f"{name}."
    return Unit(
        name,
        recipes,
        _extents([part for recipe in recipes for part in recipe.parts]),
        direct,
        sum(sizes.values()),
        sum(size for target, size in sizes.items() if target not in direct | packed),
        tuple(
            (t.removeprefix(prefix), tuple(x.shape), x.dtype, t in direct, t in packed)
            for t, x in sorted(targets.items())
        ),
        frozenset(packed),
        max((sum(sizes[t] for t in packed if t.rpartition(".")[0] == owner) for owner in owners), default=0),
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
    unit: Unit,
    model: PreTrainedModel,
    buffer: torch.Tensor,
    workspace: torch.Tensor | None,
    *,
    scratch: torch.Tensor | None = None,
    views: bool = True,
) -> "Binding":
    """Points the unit's parameters at `buffer` where they can be views, else at `workspace`; all are uint8.

    Packed ones are made in `scratch`, which all units share, each time that their module is called: memory that was
    used before is up to ten times faster to write to than new memory. With `views` false all parameters go to the
    workspace, and the buffer can be dropped once they are filled.
    """
    fills: list[Callable[[], None]] = []
    late: dict[str, list[_Late]] = {}
    raw = raw_parts(unit, buffer)
    used = 0
    for recipe in sorted(unit.recipes, key=lambda recipe: recipe.targets):
        name = recipe.targets[0]
        if views and name in unit.direct:
            put(model, name, typed(raw[recipe.sources[0].name], recipe.sources[0]))
        elif views and name in unit.packed:
            owner, _, leaf = name.rpartition(".")
            own = late.setdefault(owner, [])
            begin = own[-1].end if own else 0
            declared = model.get_parameter_or_buffer(name)
            room = scratch.narrow(0, begin, declared.nbytes).view(declared.dtype).view(declared.shape)
            fill = partial(_fill, recipe, model, raw, {name: room})
            own.append(_Late(leaf, torch.nn.Parameter(room, False), fill, begin + _padded(declared.nbytes, 64)))
        else:
            made: dict[str, torch.Tensor] = {}
            for target in recipe.targets:
                declared = model.get_parameter_or_buffer(target)
                made[target] = workspace.narrow(0, used, declared.nbytes).view(declared.dtype).view(declared.shape)
                used += _padded(declared.nbytes, 64)
                put(model, target, made[target])
            fills.append(partial(_fill, recipe, model, raw, made))
    for owner, parameters in late.items():
        _unpack_when_called(model.get_submodule(owner), parameters)
    return Binding(fills, holds_views=views and bool(unit.direct or unit.packed))


@dataclass(frozen=True)
class Binding:
    """What is left to do, once a unit's bytes are in its buffer, before its module can run."""

    fills: Sequence[Callable[[], None]]
    holds_views: bool  # if not, the buffer is free as soon as the unit is materialized

    def materialize(self) -> None:
        """Fills the parameters that are neither views nor packed: casts, fused experts, transformers' conversions."""
        with torch.no_grad():
            for fill in self.fills:
                fill()


def check_sums(unit: Unit, buffer: torch.Tensor) -> None:
    """ValueError when bytes in `buffer`, where the unit has just been read to, are not those that were written once."""
    raw = raw_parts(unit, buffer)
    for part in (part for recipe in unit.recipes for part in recipe.parts):
        if part.crc32 is not None and zlib.crc32(raw[part.name].numpy()) != part.crc32:
            raise ValueError(
                f"{part.name} in {part.file} is damaged (checksum): delete {part.file.parent} to convert again"
            )


def raw_parts(unit: Unit, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The bytes of everything that is stored for the unit, by name."""
    places = _slot_offsets(unit)
    parts = [part for recipe in unit.recipes for part in recipe.parts]
    return {part.name: buffer.narrow(0, places[part.name], part.nbytes) for part in parts}


def decode(entry: TensorEntry, raw: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    """Fills `out`, of the entry's shape, with the values that its raw bytes stand for."""
    if entry.encoding is None:
        out.copy_(typed(raw[entry.name], entry))
        return
    payload = typed(raw[entry.name], replace(entry, shape=(-1,)))
    scales = [typed(raw[scale.name], scale) for scale in entry.scales]
    values = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    entry.encoding.decode(payload, scales, values)
    if values is not out:
        out.copy_(values)


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


class _Late(NamedTuple):
    """A packed parameter of a module: its place in the scratch, what fills it, and where the next one begins."""

    leaf: str
    parameter: torch.nn.Parameter
    fill: Callable[[], None]
    end: int


def _unpack_when_called(module: torch.nn.Module, parameters: Sequence[_Late]) -> None:
    """Gives `module` its packed parameters for the time of each call; a read at another time fails loudly."""
    absent = {each.leaf: getattr(module, each.leaf) for each in parameters}

    def before(*_: object) -> None:
        with torch.no_grad():
            for each in parameters:
                each.fill()
                setattr(module, each.leaf, each.parameter)

    def after(*_: object) -> None:
        for leaf, parameter in absent.items():
            setattr(module, leaf, parameter)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _fill(
    recipe: Recipe, model: PreTrainedModel, raw: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]
) -> None:
    """Fills the targets of `recipe`: each source into its region, or all through transformers' conversion."""
    first = made[recipe.targets[0]]
    regions = recipe.regions(first)
    if regions is not None:
        for region, entry in zip(regions, recipe.sources, strict=True):
            decode(entry, raw, region)
        return
    sources = [torch.empty(entry.shape, dtype=first.dtype, device=first.device) for entry in recipe.sources]
    for entry, source in zip(recipe.sources, sources, strict=True):
        decode(entry, raw, source)
    for name, tensor in recipe.convert(model, sources).items():
        made[name].copy_(tensor)


def _is_direct(recipe: Recipe, target: torch.Tensor) -> bool:
    entry = recipe.sources[0]
    is_as_stored = recipe.converter is None and entry.encoding is None
    return is_as_stored and entry.dtype == target.dtype and entry.offset % entry.dtype.itemsize == 0


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
    for entry in (part for recipe in unit.recipes for part in recipe.parts):
        for extent in unit.extents:
            if extent.file == entry.file and extent.offset <= entry.offset < extent.offset + extent.nbytes:
                offsets[entry.name] = extent.slot_offset + entry.offset - extent.offset
                break
    return offsets


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
