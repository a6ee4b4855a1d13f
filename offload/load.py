"""A checkpoint becomes an ordinary transformers model whose streamed layers fetch themselves."""

import re
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import TracebackType

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from offload.checkpoint import Checkpoint
from offload.gated import reuse_inner
from offload.gather import embedding_names, gather_on_host, is_tied
from offload.layout import Binding, Unit, assign_slots, bind, make_unit, put, raw_parts, typed
from offload.names import Recipe, match
from offload.overflow import refuse_overflow
from offload.plan import Plan, shared_layers
from offload.prefill import chunk_mlps, chunk_rows
from offload.product import put_weights_first
from offload.store import ONE_AT_A_TIME, ArenaStore, FileStore, Reading, WeightStore, anonymous
from offload.stream import CudaLink, HostLink, LayerStreamer

Transform = Callable[[str, torch.Tensor], torch.Tensor]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Outline:
    """A model without weights, and its units: `layers` in order of use, `rest` for embedding, norm and head."""

    model: PreTrainedModel
    layers: tuple[Unit, ...]
    rest: tuple[Unit, ...]

    @property
    def unpacked_bytes(self) -> int:
        """Memory of packed matrices while they are used: those of one module at a time."""
        return max((unit.unpacked_bytes for unit in self.layers), default=0)

    @property
    def rest_bytes(self) -> dict[str, int]:
        """Memory of what always stays, by name of parameter."""
        return {unit.name: unit.resident_bytes for unit in self.rest}


@dataclass
class Loaded:
    """A model ready to run. Closing it joins the loader thread and closes the files; resident layers still work."""

    model: PreTrainedModel
    plan: Plan
    streamer: LayerStreamer | None
    outline: Outline = field(repr=False)

    def close(self) -> None:
        """Ends streaming; may be called again."""
        if self.streamer is not None:
            self.streamer.close()

    def __enter__(self) -> "Loaded":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def outline(
    checkpoint: Checkpoint, *, dtype: torch.dtype | None = None, attn_implementation: str | None = None
) -> Outline:
    """Units and their sizes for computing in `dtype` (the stored one by default), from headers alone.

    Raises ValueError when the checkpoint lacks a tensor, has one too many or has one of the wrong shape.
    """
    model = _skeleton(checkpoint, dtype or checkpoint.dtype, attn_implementation)
    recipes = match(model, checkpoint.tensors)
    stem, layers = decoder_layers(model)
    by_layer: list[list[Recipe]] = [[] for _ in layers]
    rest: list[Recipe] = []
    for recipe in recipes:
        if recipe.targets[0].startswith(stem):
            by_layer[int(recipe.targets[0].removeprefix(stem).partition(".")[0])].append(recipe)
        else:
            rest.append(recipe)
    return Outline(
        model,
        tuple(make_unit(f"{stem}{i}", model, own, may_pack=True) for i, own in enumerate(by_layer)),
        tuple(make_unit(recipe.targets[0], model, [recipe]) for recipe in rest),
    )


def load_model(
    checkpoint: Checkpoint,
    plan: Plan,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    transform: Transform | None = None,
    share: Loaded | None = None,
    progress: Progress | None = None,
    reading: Reading = ONE_AT_A_TIME,
) -> Loaded:
    """Loads unit by unit, never holding more than `plan` says.

    `transform(name, tensor)` gives what a stored tensor of a resident layer is replaced by. `share` is a model loaded
    from the same checkpoint whose embedding, norm, head and `shared_layers` are used instead of being read again.
    `progress` is told bytes done and bytes in all. `reading` is how the disk is read. Raises ValueError for a
    checkpoint that is not the model and for a plan that parts an embedding from the head, OSError naming the file.
    """
    device = torch.device(device)
    parts = outline(checkpoint, dtype=dtype, attn_implementation=attn_implementation)
    model = parts.model
    on_host = embedding_names(model) if (share.plan if share else plan).gathers_on_host else frozenset()
    if on_host and is_tied(model.config):
        raise ValueError(
            "the head's matrix is the embedding's, so it cannot rest in main memory: plan it on the device"
        )
    stem, layers = decoder_layers(model)
    shared = frozenset(shared_layers(share.plan) if share else ()).intersection(plan.resident)
    own = [i for i in range(len(layers)) if i not in shared]
    resident = [parts.layers[i] for i in plan.resident if i not in shared]
    streamed = [parts.layers[i] for i in plan.streamed]
    files = {part.file for entry in checkpoint.tensors.values() for part in entry.parts}
    store = FileStore(files, reading)
    try:
        if share is None:
            resident = [*parts.rest, *resident]
        else:
            _take_over(model, parts.rest, share.model)
            _, theirs = decoder_layers(share.model)
            for i in shared:
                layers[i] = theirs[i]
        in_ram = [unit for unit, tier in zip(streamed, plan.tiers, strict=True) if tier == "ram"]
        report = _counting(progress, sum(unit.slot_bytes for unit in (*resident, *in_ram)))
        kept = [unit for unit in parts.layers if transform is None or not unit.is_encoded]  # others become numbers
        scratch = _room(max((unit.unpacked_bytes for unit in kept), default=0), device)
        _load_resident(model, resident, store, device, on_host, transform, scratch, report)
        filled = {name for unit in (*parts.rest, *parts.layers) for recipe in unit.recipes for name in recipe.targets}
        model.tie_weights(missing_keys=set(model.state_dict()) - filled, recompute_mapping=False)
        _move_buffers(model, device)
        if on_host:
            gather_on_host(model.get_input_embeddings(), device)
        streamer = _stream(model, plan, streamed, store, device, scratch, report) if streamed else None
    except BaseException:
        store.close()
        raise
    if streamer is None:
        store.close()
    put_weights_first(model)
    if device.type == "cpu":
        reuse_inner(layers[i] for i in own)
    chunk_mlps((layers[i] for i in own), chunk_rows(device))
    if (dtype or checkpoint.dtype) == torch.float16:
        refuse_overflow(model, layers, stem, device)
    packed = {name for unit in parts.layers for name in unit.packed}
    named = (*model.named_parameters(), *model.named_buffers())
    loose = [name for name, tensor in named if tensor.is_meta and name not in packed]
    assert not loose, f"left without bytes: {loose}"
    return Loaded(model, plan, streamer, parts)


def _skeleton(checkpoint: Checkpoint, dtype: torch.dtype, attn_implementation: str | None) -> PreTrainedModel:
    """Parameters without storage; buffers that no file holds are computed as usual."""
    config = deepcopy(checkpoint.config)
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    for pattern, kept in model._get_dtype_plan(dtype).items():  # routers and the like that stay in fp32
        for name, parameter in model.named_parameters():
            if re.search(pattern.replace("*", ".*"), name):
                put(model, name, parameter.to(kept))
    if checkpoint.generation_config is not None:
        model.generation_config = deepcopy(checkpoint.generation_config)
    return model.requires_grad_(False).eval()


def decoder_layers(model: PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    """The layers in order of use, and what their parameters' names begin with."""
    decoder, count = model.get_decoder(), model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and module in decoder.children():
            return f"{name}.", module
    raise ValueError(f"{type(model).__name__} has no plain list of {count} decoder layers, so it cannot be streamed")


def _counting(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Turns bytes as they come into `progress(done, total)`."""
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return report


def _load_resident(
    model: PreTrainedModel,
    units: Sequence[Unit],
    store: WeightStore,
    compute_device: torch.device,
    on_host: Collection[str],
    transform: Transform | None,
    scratch: torch.Tensor,
    report: Callable[[int], None],
) -> None:
    stem, _ = decoder_layers(model)
    for unit in units:
        device = torch.device("cpu") if unit.name in on_host else compute_device
        stored = anonymous(unit.slot_bytes)
        store.read_into(unit, stored, lambda: False)
        if device.type != "cpu":
            stored = stored.to(device)
        changes = transform is not None and unit.name.startswith(stem)
        if changes and not unit.is_encoded:
            _transform_stored(unit, stored, transform)
        if unit.packed and not (changes and unit.is_encoded):
            bind(unit, model, stored, _room(unit.workspace_bytes, device), scratch=scratch).materialize()
        elif unit.packed or unit.workspace_bytes:
            bind(unit, model, stored, _room(unit.parameter_bytes, device), views=False).materialize()
        else:
            bind(unit, model, stored, None)
        if changes and unit.is_encoded:
            _transform_decoded(unit, model, transform)
        report(unit.slot_bytes)


def _transform_stored(unit: Unit, stored: torch.Tensor, transform: Transform) -> None:
    raw = raw_parts(unit, stored)
    for entry in (entry for recipe in unit.recipes for entry in recipe.sources):
        changed = transform(entry.name, typed(raw[entry.name], entry))
        raw[entry.name].copy_(changed.contiguous().view(-1).view(torch.uint8))


def _transform_decoded(unit: Unit, model: PreTrainedModel, transform: Transform) -> None:
    for name in (target for recipe in unit.recipes for target in recipe.targets):
        parameter = model.get_parameter_or_buffer(name)
        with torch.no_grad():
            parameter.copy_(transform(name, parameter))


def _take_over(model: PreTrainedModel, rest: Sequence[Unit], share: PreTrainedModel) -> None:
    for unit in rest:
        for name in unit.recipes[0].targets:
            needed, given = model.get_parameter_or_buffer(name), share.get_parameter_or_buffer(name)
            if (needed.shape, needed.dtype) != (given.shape, given.dtype):
                raise ValueError(
                    f"cannot share {name}: it is {list(given.shape)} {given.dtype} in the loaded model,"
                    f" {list(needed.shape)} {needed.dtype} is needed; load both with one dtype"
                )
            put(model, name, given)


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    for name, buffer in list(model.named_buffers()):
        if buffer.device != device and not buffer.is_meta:
            put(model, name, buffer.to(device))


def _stream(
    model: PreTrainedModel,
    plan: Plan,
    units: Sequence[Unit],
    store: WeightStore,
    device: torch.device,
    scratch: torch.Tensor,
    report: Callable[[int], None],
) -> LayerStreamer:
    """Slots, bindings, hooks and the running ring for the streamed `units`."""
    on_gpu = device.type == "cuda"
    in_ram = [unit for unit, tier in zip(units, plan.tiers, strict=True) if tier == "ram"]
    if in_ram:
        files, store = store, ArenaStore(in_ram, store, pinned=on_gpu, report=report)
        if len(in_ram) == len(units):
            files.close()
    slots = assign_slots(units, plan.num_slots)
    buffers = [_room(nbytes, device) for nbytes in slots.slot_bytes]
    workspaces = {signature: _room(nbytes, device) for signature, nbytes in slots.workspace_bytes.items()}
    own_slots = [buffers[slot] for slot in slots.slot_of]
    bindings = [
        bind(unit, model, buffer, workspaces.get(unit.signature), scratch=scratch)
        for unit, buffer in zip(units, own_slots, strict=True)
    ]
    link = (CudaLink if on_gpu else HostLink)(store, units, own_slots)
    streamer = LayerStreamer(units, slots.slot_of, link)
    _, layers = decoder_layers(model)
    for k, (i, binding) in enumerate(zip(plan.streamed, bindings, strict=True)):
        _attach(layers[i], streamer, k, binding)
    return streamer


def _attach(layer: torch.nn.Module, streamer: LayerStreamer, k: int, binding: Binding) -> None:
    def before(*_: object) -> None:
        streamer.acquire(k)
        binding.materialize()
        if not binding.holds_views:
            streamer.release(k)

    def after(*_: object) -> None:
        streamer.release(k)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)  # a failed layer gives its slot back too


def _room(nbytes: int, device: torch.device) -> torch.Tensor:
    return anonymous(nbytes) if device.type == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=device)
