"""What only a GPU can show: copy rates, order of copies and compute, replayed steps, passes under a VRAM cap.

    python benchmarks/device_check.py                        # a CUDA GPU: under 8 minutes, 5 GB of disk, no download
    python benchmarks/device_check.py --tiny --device cpu    # every part in seconds, to see that they run

Weights are random. Of the large targets one layer is stored and every layer points to its bytes, so that a 70B model
takes the disk and the pinned memory of one layer while all of its bytes still cross the link in each pass. The VRAM cap
counts the CUDA context too. The last line printed is one JSON object; except with --tiny it is also written to
benchmarks/results/, by the name of the device.
"""

import argparse
import gc
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from app.quiet import quiet_libraries
from offload.checkpoint import Checkpoint
from offload.entries import TensorEntry
from offload.hardware import Rates, measure_decode_bps, measure_rates, probe
from offload.layout import Unit
from offload.load import Loaded, load_model, outline
from offload.plan import EMBEDDING, DoesNotFit, plan
from offload.predict import Curve, Draft, predict
from offload.quantize import Nf4
from offload.replay import Replays
from offload.shape import Shape, anatomy, shape_of
from offload.store import ArenaStore, WeightStore, anonymous, pin, unpin
from offload.stream import CudaLink, HostLink
from offload.working import working_bytes
from specexec.device import compute_device
from specexec.lm import CachedLM, score_tree
from specexec.tree import TokenTree

RESULTS = Path(__file__).with_name("results")
CAPS = (24_000_000_000, 11_000_000_000)
BUDGETS = (1, 64, 256, 512, 1024)
TINY_BUDGETS = (1, 8)
CTX = 64
LIMIT_S = 420.0
STALL_S = 0.008  # several times what reading and copying a layer of _TINY takes
STALL_CYCLES = 16_000_000  # about as long
POISON = 255  # as the bytes of floats: NaN
TILE_VALUES = 1 << 22
NO_DRAFT = Draft("none", Curve({1: (1.0, 1.0, 1.0)}, {}, "none"), None, lambda rows, batch: {})

_SMALL = {"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
_LLAMA_70B = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
_LLAMA_70B |= {"num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False}
_QWEN3_32B = {"vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
_QWEN3_32B |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
_TINY = _SMALL | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
_LARGER = _SMALL | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}


class OneLayerArena(ArenaStore):
    """An arena in which all units, alike to the byte, are the first one."""

    def __init__(self, units: Sequence[Unit], source: WeightStore, **options: object) -> None:
        self._first = units[0]
        super().__init__([self._first], source, **options)

    def holds(self, unit: Unit) -> bool:
        return True

    def bytes_of(self, unit: Unit) -> torch.Tensor:
        return super().bytes_of(self._first)


class LateHostLink(HostLink):
    """Poisons the slot and takes its time before it fills it."""

    def load(self, k: int, cancelled: Callable[[], bool]) -> bool:
        self._slots[k].fill_(POISON)
        time.sleep(STALL_S)
        return super().load(k, cancelled)


class LateCudaLink(CudaLink):
    """Poisons the slot, once it is free, and takes its time before it fills it: all of it on the copy stream."""

    def load(self, k: int, cancelled: Callable[[], bool]) -> bool:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed[self._slots[k].data_ptr()])
            self._slots[k].fill_(POISON)
            torch.cuda._sleep(STALL_CYCLES)
        return super().load(k, cancelled)


class HastyHostLink(LateHostLink):
    """The fault that a late copy must bring to light: compute that goes ahead without its bytes."""

    def load(self, k: int, cancelled: Callable[[], bool]) -> bool:
        self._slots[k].fill_(POISON)
        return True


class HastyCudaLink(LateCudaLink):
    """The same fault on a GPU: compute that does not wait for the copy."""

    def before_compute(self, k: int) -> None:
        """Waits for nothing."""


def store_random(
    folder: Path, config: PretrainedConfig, *, bits: int, dtype: torch.dtype, is_shared: bool = False
) -> Checkpoint:
    """A checkpoint of random weights, matrices of its layers in NF4 if `bits` is 4.

    `is_shared`: all layers, and all other tensors of one shape, are the same bytes of the file.
    """
    parts, file = anatomy(config), folder / f"{config.model_type}-{bits}.weights"
    generator = torch.Generator().manual_seed(5)
    written: dict[tuple[str, tuple[int, ...]], TensorEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    named = [("", name, shape) for name, shape in parts.rest]
    named += [(f"model.layers.{i}.", name, shape) for i, kind in enumerate(parts.layers) for name, shape in kind]
    with file.open("wb") as stream:

        def append(name: str, kind: torch.dtype, shape: tuple[int, ...]) -> TensorEntry:
            stream.seek(-(-stream.tell() // 64) * 64)
            offset, nbytes = stream.tell(), math.prod(shape) * kind.itemsize
            tile = _random(name, kind, min(math.prod(shape), TILE_VALUES), generator).view(torch.uint8).numpy()
            for start in range(0, nbytes, tile.nbytes):
                stream.write(tile[: nbytes - start])
            return TensorEntry(name, file, offset, nbytes, kind, shape)

        for stem, name, shape in named:
            key = (name if stem else "", shape) if is_shared else (f"{stem}{name}", shape)
            if key not in written:
                packed = bits == 4 and bool(stem) and (name, shape) in parts.quantized
                layout = Nf4().layout(shape) if packed else {"": (dtype, shape)}
                first, *scales = [append(f"{name}{end}", *each) for end, each in layout.items()]
                written[key] = replace(first, shape=shape, encoding=Nf4(), scales=tuple(scales)) if packed else first
            entry = written[key]
            scales = tuple(replace(scale, name=f"{stem}{scale.name}") for scale in entry.scales)
            tensors[f"{stem}{name}"] = replace(entry, name=f"{stem}{name}", scales=scales)
    return Checkpoint(folder, config, None, tensors, "NF4" if bits == 4 else None)


def _random(name: str, dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.uint8:
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if name.endswith((".absmax_scale", ".absmax_mean")):  # every absmax between 0.02 and 0.04
        return torch.full((count,), 0.01 if name.endswith("scale") else 0.03, dtype=dtype)
    noise = torch.randn(count, generator=generator)
    return (1 + 0.1 * noise if "norm" in name else 0.02 * noise).to(dtype)


def copy_rates(device: torch.device, nbytes: int) -> dict:
    """Bytes per second into `device` from pageable and from pinned memory; pinned_bps is None where there is none."""
    source, target = anonymous(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=device)
    source.fill_(1)
    rates = {"pageable_bps": _copy_bps(source, target), "pinned_bps": None}
    if device.type == "cuda" and pin(source):
        try:
            rates["pinned_bps"] = _copy_bps(source, target)
        finally:
            unpin(source)
    return rates


def _copy_bps(source: torch.Tensor, target: torch.Tensor) -> float:
    seconds = []
    for _ in range(6):
        _wait_for(target.device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait_for(target.device)
        seconds.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(seconds[1:])  # the first one touches the memory


def equal_logits(folder: Path, config: PretrainedConfig, device: torch.device) -> dict[str, bool]:
    """Whether a model streamed through two slots gives the resident one's logits, by format and tier.

    And whether it does so with its embedding in main memory.
    """
    embedding = (EMBEDDING, config.vocab_size * config.hidden_size * torch.float32.itemsize)
    found: dict[str, bool] = {}
    for bits in (16, 4):
        checkpoint = store_random(folder, config, bits=bits, dtype=torch.float32)
        expected = _resident_logits(checkpoint, device)
        for tier in ("ram", "disk"):
            with _streamed(checkpoint, device, tier) as loaded:
                found[f"{bits} bits, {tier}"] = _same(_logits(loaded.model), expected)
        with _streamed(checkpoint, device, "ram", embedding) as loaded:
            found[f"{bits} bits, embedding in main memory"] = _same(_logits(loaded.model), expected)
    return found


def ordering(folder: Path, config: PretrainedConfig, device: torch.device) -> dict[str, bool]:
    """Whether slow compute is never overtaken by a copy, nor a slow copy by compute.

    The *_control entries say whether the same tests notice a ring that is broken on purpose.
    """
    checkpoint = store_random(folder, config, bits=16, dtype=torch.float32)
    expected = _resident_logits(checkpoint, device)
    name, late, hasty = ("HostLink", LateHostLink, HastyHostLink)
    if device.type == "cuda":
        name, late, hasty = ("CudaLink", LateCudaLink, HastyCudaLink)
    found: dict[str, bool] = {}
    for tier in ("ram", "disk"):
        for is_control in (False, True):
            end = f", {tier}{', control' if is_control else ''}"
            with _streamed(checkpoint, device, tier) as loaded:
                _stall_layers(loaded, device, release_early=is_control)
                found[f"slow compute{end}"] = _same(_logits(loaded.model), expected) != is_control
            with patch(f"offload.load.{name}", hasty if is_control else late):
                loaded = _streamed(checkpoint, device, tier)
            with loaded:
                found[f"slow copy{end}"] = _same(_logits(loaded.model), expected) != is_control
    return found


def _stall_layers(loaded: Loaded, device: torch.device, *, release_early: bool) -> None:
    """Has every layer hold its slot for a while before it computes, or give it back before (the fault looked for)."""
    for k, layer in enumerate(loaded.model.get_decoder().layers):

        def stall(*_: object, k: int = k) -> None:
            if release_early:
                loaded.streamer.release(k)
            if device.type == "cuda":
                torch.cuda._sleep(STALL_CYCLES)
            else:
                time.sleep(STALL_S)

        layer.register_forward_pre_hook(stall)


def _resident_logits(checkpoint: Checkpoint, device: torch.device) -> list[torch.Tensor]:
    layers = outline(checkpoint).layers
    chosen = plan(layers, fixed={}, limit_bytes=1 << 60, resident=len(layers))
    with load_model(checkpoint, chosen, device=device) as loaded:
        return _logits(loaded.model)


def _streamed(checkpoint: Checkpoint, device: torch.device, tier: str, *on_host: tuple[str, int]) -> Loaded:
    ram_bytes = 1 << 60 if tier == "ram" else None
    chosen = plan(outline(checkpoint).layers, fixed={}, limit_bytes=1 << 60, resident=0, ram_bytes=ram_bytes)
    return load_model(checkpoint, replace(chosen, host_items=(*on_host, *chosen.host_items)), device=device)


@torch.no_grad()
def _logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """Of four passes, each over other tokens."""
    tokens = torch.arange(4 * 24, device=compute_device(model)).view(4, 1, 24) * 5 % model.config.vocab_size
    return [model(each, use_cache=False).logits.cpu() for each in tokens]


def _same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def draft_steps(config: PretrainedConfig, device: torch.device) -> dict:
    """Seconds of draft steps of 32 rows, plain and in frames, and whether both give the same logits.

    On a GPU the frames are replayed as CUDA graphs, and the notes say why if they are not; elsewhere they are run.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).requires_grad_(False).eval()
    plain, framed = CachedLM(model, CTX + 64), CachedLM(model, CTX + 64)
    notes: list[str] = []
    framed.record_steps(Replays(device, notes.append) if device.type == "cuda" else lambda shape, run: run())
    tree, context = _tree(32, plain.vocab_size), np.arange(CTX) % plain.vocab_size
    seconds: dict[str, list[float]] = {"plain_s": [], "framed_s": []}
    logits: dict[str, torch.Tensor] = {}
    for _ in range(20):
        for name, lm in (("plain_s", plain), ("framed_s", framed)):
            lm.prefill(context)
            _wait_for(device)
            start = time.perf_counter()
            logits[name] = lm.extend(tree.tokens, tree.parents)
            _wait_for(device)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(each[2:]) for name, each in seconds.items()}
    error = (logits["framed_s"] - logits["plain_s"]).float().norm() / logits["plain_s"].float().norm()
    return {**medians, "ratio": medians["framed_s"] / medians["plain_s"], "error": float(error), "notes": notes}


def pass_times(
    checkpoint: Checkpoint,
    device: torch.device,
    link_bps: float,
    *,
    caps: Sequence[int],
    budgets: Sequence[int],
    deadline: float,
) -> dict[str, dict]:
    """Planned and actual passes, by cap in bytes of device memory; or the reason why there are none.

    Without `caps`: room for two slots, and for two slots and one resident layer.
    """
    parts = outline(checkpoint)
    shape = shape_of(parts, checkpoint.dtype)
    hardware = probe(device)
    context_bytes = hardware.total_bytes - hardware.free_bytes - hardware.base_bytes if device.type == "cuda" else 0
    fixed = {**working_bytes(shape, device, ctx=CTX, budget=max(budgets)), "context and other programs": context_bytes}
    caps = caps or [sum(fixed.values()) + count * parts.layers[0].slot_bytes for count in (2, 3)]
    cases: dict[str, dict] = {}
    for cap_bytes in caps:
        try:
            if cap_bytes > hardware.total_bytes:
                raise DoesNotFit(f"{hardware.name} has no more than {hardware.total_bytes / 1e9:.1f} GB")
            chosen = plan(parts.layers, fixed=fixed, limit_bytes=cap_bytes, ram_bytes=1 << 60)
            rates = _rates(shape, device, link_bps, rows=max(budgets) + 1)
            _limit_device(device, cap_bytes - context_bytes)
            with patch("offload.load.ArenaStore", OneLayerArena):
                loaded = load_model(checkpoint, chosen, device=device)
            with loaded:
                case = _timed_passes(loaded, shape, rates, budgets=budgets, deadline=deadline)
                if device.type == "cuda":
                    case["peak_bytes"] = torch.cuda.max_memory_allocated(device) + context_bytes
                    case["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device) + context_bytes
        except (DoesNotFit, torch.OutOfMemoryError) as error:
            case = {"failed": str(error).partition("\n")[0]}
        loaded = None  # its memory must be free before the next cap is set
        _limit_device(device, None)
        cases[f"{cap_bytes / 1e9:g} GB"] = {"cap_bytes": cap_bytes, **case}
    return cases


def _timed_passes(
    loaded: Loaded, shape: Shape, rates: Rates, *, budgets: Sequence[int], deadline: float
) -> dict[str, object]:
    """Passes over the same context with trees of each budget; those that begin after `deadline` are left out."""
    target = CachedLM(loaded.model, CTX + max(budgets))
    context = np.arange(CTX) % target.vocab_size
    score_tree(target, context, _tree(max(budgets), target.vocab_size)).argmax().item()
    passes: dict[int, dict] = {}
    for budget in (each for each in budgets if time.perf_counter() < deadline):
        seconds: list[float] = []
        nbytes: list[int] = []
        for _ in range(3):
            before, start = loaded.streamer.streamed_bytes, time.perf_counter()
            score_tree(target, context, _tree(budget, target.vocab_size)).argmax().item()  # item() waits for the device
            seconds.append(time.perf_counter() - start)
            nbytes.append(loaded.streamer.streamed_bytes - before)
        s_per_pass = statistics.median(seconds[1:])  # the first one after a change of size warms up
        predicted = predict(shape, loaded.plan, NO_DRAFT, budget, rates)
        passes[budget] = {
            "s_per_pass": s_per_pass,
            "planned_s_per_pass": predicted.s_per_pass,
            "planned_link_s": predicted.link_s,
            "planned_compute_s": predicted.compute_s,
            "time_error": predicted.s_per_pass / s_per_pass - 1,
            "link_utilisation": sum(nbytes[1:]) / sum(seconds[1:]) / rates.link_bps,
        }
    return {
        "num_resident": len(loaded.plan.resident),
        "num_streamed": len(loaded.plan.streamed),
        "streamed_bytes": loaded.plan.streamed_bytes,
        "planned_peak_bytes": loaded.plan.total_bytes,
        "flops": rates.flops,
        "decode_bps": rates.decode_bps,
        "budgets": passes,
    }


def _rates(shape: Shape, device: torch.device, link_bps: float, *, rows: int) -> Rates:
    """This device's rates, but for the link: that was measured over larger copies."""
    rates = measure_rates(device, shape.dtype, shape.matrix, rows=rows, disk_bps=math.inf)
    decode_bps = measure_decode_bps(shape.packed, shape.dtype, device) if shape.packed else None
    return replace(rates, link_bps=link_bps, decode_bps=decode_bps)


def _tree(num_nodes: int, vocab_size: int) -> TokenTree:
    """A root's children: what is guessed does not change what a pass costs."""
    tokens = np.arange(num_nodes) % vocab_size
    return TokenTree(tokens, np.full(num_nodes, -1), np.zeros(num_nodes, np.float32))


def _limit_device(device: torch.device, limit_bytes: int | None) -> None:
    """Frees what earlier parts have left on a GPU, counts the peak anew and sets torch's limit there; None lifts it."""
    gc.collect()
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit_bytes or total) / total), device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check(device: torch.device, *, is_tiny: bool) -> dict[str, object]:
    """Every part in turn, each printed as it ends."""
    deadline = time.perf_counter() + LIMIT_S
    hardware = probe(device)
    dtype = torch.bfloat16 if hardware.has_bf16 else torch.float16
    copies = copy_rates(device, (8 if is_tiny else 512) << 20)
    link_bps = copies["pinned_bps"] or copies["pageable_bps"]
    found: dict[str, object] = {
        "device": hardware.name,
        "torch": torch.__version__,
        "dtype": str(dtype),
        "copy": copies,
    }
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        tiny = AutoConfig.for_model("llama", **_TINY)
        small = tiny if is_tiny else AutoConfig.for_model("llama", **_LARGER)
        found["equal_logits"] = equal_logits(Path(folder), small, device)
        found["ordering"] = ordering(Path(folder), tiny, device)
        found["draft_steps"] = draft_steps(small, device)
        print(json.dumps(found), flush=True)
        targets = {"70B NF4": ("llama", _LLAMA_70B, 4), "32B 16 bits": ("qwen3", _QWEN3_32B, 16)}
        for name, (family, fields, bits) in targets.items():
            config = AutoConfig.for_model(family, **(_TINY if is_tiny else fields))
            checkpoint = store_random(Path(folder), config, bits=bits, dtype=dtype, is_shared=True)
            found[name] = pass_times(
                checkpoint,
                device,
                link_bps,
                caps=() if is_tiny else CAPS,
                budgets=TINY_BUDGETS if is_tiny else BUDGETS,
                deadline=deadline,
            )
            print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="models of four small layers")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this check needs a CUDA GPU and a torch built for it: try --tiny --device cpu")
    if arguments.device == "cpu" and not arguments.tiny:
        raise SystemExit("on the CPU this check is only run small: add --tiny")
    quiet_libraries()
    found = check(torch.device(arguments.device, 0), is_tiny=arguments.tiny)
    if not arguments.tiny:
        RESULTS.mkdir(exist_ok=True)
        name = re.sub(r"\W+", "-", str(found["device"])).strip("-").lower()
        (RESULTS / f"device-{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
