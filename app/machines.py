"""Machines by name, from the table in `configs/hardware.toml`, as what a plan asks of them."""

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from app.spelling import nearest
from offload.entries import TensorEntry
from offload.hardware import (
    CPU_LAYER_S,
    CPU_LINK_COST,
    CPU_VALUE_CORES,
    CPU_VALUE_S,
    GPU_LAYER_S,
    Hardware,
    Rates,
    measure_decode_bps,
    measure_rates,
    probe,
)
from offload.predict import Curve
from offload.prefill import CPU_ROWS
from offload.shape import Shape

_GBPS_PER_LANE = {"3.0": 0.985, "4.0": 1.969, "5.0": 3.938}
_NUM_CORES = 8  # of the table's CPU
_CONTEXT_BYTES = 600 << 20  # a CUDA context, and the desktop of a machine that is somebody's own


@dataclass(frozen=True)
class Machine:
    """What there is and how fast it is; `facts` say so in words, with where the figures come from.

    is_named: whether it is of the table, under the name that its hardware has, and not this one.
    """

    hardware: Hardware
    rates: Rates
    facts: tuple[str, ...]
    is_named: bool = False

    def decoding_rate(self, shape: Shape) -> float | None:
        """The rate of decoding a model's matrices, measured; None where none are, or where it cannot be."""
        if self.is_named or not _is_measurable(shape):
            return None
        return _decoding_rate(shape.packed, shape.dtype, self.hardware.device)


def named_machine(name: str, ram_bytes: int | None = None, disk_bps: float | None = None) -> Machine:
    """A machine with the GPU `name` ("RTX 4090", "4090"; "none" for a CPU alone).

    Raises ValueError that names the nearest known GPUs.
    """
    table = read_table("hardware")
    ram = ram_bytes or table["host"]["ram_gib"] << 30
    disk = disk_bps or assumed_disk_bps()
    assumed = "" if ram_bytes and disk_bps else " (assumed where not given: --ram, --disk-rate)"
    host = f"RAM {ram / 1e9:.0f} GB, disk {disk / 1e9:.1f} GB/s{assumed}"
    reached = table["reached"]
    if _plain(name) in ("none", "cpu"):
        return _cpu_machine(table["cpu"], reached, ram, disk, host)
    gpu = _find(name, table["gpu"])
    device, total = torch.device("cuda"), gpu["memory_gib"] << 30
    has_bf16 = float(gpu["capability"]) >= 8
    link = _GBPS_PER_LANE[gpu["pcie"]] * gpu["lanes"] * reached["link"] * 1e9
    rates = Rates(
        link,
        disk,
        gpu["tflops"] * reached["flops"] * 1e12,
        gpu["memory_gbps"] * reached["memory"] * 1e9,
        GPU_LAYER_S,
    )
    hardware = Hardware(device, gpu["name"], total, total - _CONTEXT_BYTES, 0, ram, ram, has_bf16)
    facts = (
        f"{gpu['name']}: {gpu['memory_gib']} GiB, {hardware.free_bytes / 1e9:.1f} GB of it taken as free,"
        f" {'bf16' if has_bf16 else 'no bf16, so fp16'}",
        f"link {link / 1e9:.1f} GB/s (PCIe {gpu['pcie']} x{gpu['lanes']}), {rates.flops / 1e12:.0f} TFLOPS,"
        f" memory {rates.memory_bps / 1e9:.0f} GB/s reached ({gpu['source']})",
        host,
    )
    return Machine(hardware, rates, facts, is_named=True)


def this_machine(device: str, target: Shape, *, rows: int, disk_bps: float) -> Machine:
    """This machine as it is now, its rates measured for `rows` tokens and matrices like those of `target`."""
    where = torch.device(device)
    rates = measure_rates(where, target.dtype, target.matrix, rows=rows, disk_bps=disk_bps)
    if _is_measurable(target):
        rates = replace(rates, decode_bps=measure_decode_bps(target.packed, target.dtype, where))
    hardware = probe(device)
    facts = [
        f"{hardware.name}: {hardware.free_bytes / 1e9:.1f} GB free of {hardware.total_bytes / 1e9:.1f} GB,"
        f" {'bf16' if hardware.has_bf16 else 'no bf16'}",
        f"measured: {rates.flops / 1e12:.2f} TFLOPS at {rows} tokens, memory {rates.memory_bps / 1e9:.1f} GB/s",
    ]
    if hardware.device.type != "cpu":
        facts.append(f"link {rates.link_bps / 1e9:.1f} GB/s, RAM {hardware.ram_free_bytes / 1e9:.1f} GB free")
    return Machine(hardware, rates, tuple(facts))


def _is_measurable(shape: Shape) -> bool:
    return bool(shape.packed and shape.decoded_bytes)


@cache  # of a draft that many plans are compared with
def _decoding_rate(packed: tuple[TensorEntry, ...], dtype: torch.dtype, device: torch.device) -> float:
    return measure_decode_bps(packed, dtype, device)


def assumed_disk_bps() -> float:
    """The reading rate of a disk that nothing is known of."""
    return read_table("hardware")["host"]["disk_gbps"] * 1e9


def curves() -> dict[str, Curve]:
    """Tokens per pass by kind of draft: self, model, ngram, none."""
    return {
        kind: Curve(
            {int(budget): tuple(tokens) for budget, tokens in entry["tokens"].items()},
            {int(budget): steps for budget, steps in entry.get("steps", {}).items()},
            entry["source"],
        )
        for kind, entry in read_table("acceptance").items()
    }


def read_table(name: str) -> dict[str, Any]:
    """A table of `configs/` that is no preset."""
    return tomllib.loads((files("configs") / f"{name}.toml").read_text())


def _cpu_machine(cpu: dict[str, Any], reached: dict[str, Any], ram: int, disk: float, host: str) -> Machine:
    rates = Rates(
        float("inf"),
        disk,
        cpu["tflops"] * reached["flops"] * 1e12,
        cpu["memory_gbps"] * reached["memory"] * 1e9,
        CPU_LAYER_S,
        CPU_VALUE_S * CPU_VALUE_CORES / _NUM_CORES,
        link_cost=CPU_LINK_COST,
        chunk_rows=CPU_ROWS,
    )
    hardware = Hardware(torch.device("cpu"), "CPU", ram, int(0.9 * ram), 0, ram, int(0.9 * ram), True)
    return Machine(hardware, rates, (f"no GPU, the CPU computes ({cpu['source']})", host), is_named=True)


def _find(name: str, gpus: list[dict[str, Any]]) -> dict[str, Any]:
    by_name = {_plain(gpu["name"]): gpu for gpu in gpus}
    asked = _plain(name)
    if asked in by_name:
        return by_name[asked]
    longer = [gpu for known, gpu in by_name.items() if asked and known.startswith(asked)]
    if len(longer) == 1:
        return longer[0]
    known = [gpu["name"] for gpu in longer or gpus]
    raise ValueError(f"no GPU {name!r} in the table{nearest(name, known)} (`none` for a CPU alone)")


def _plain(name: str) -> str:
    """`NVIDIA GeForce RTX 4090 24GB` and `4090` become alike where nothing else has that number."""
    return re.sub(r"nvidia|geforce|rtx|tesla|[^a-z0-9]", "", name.lower())
