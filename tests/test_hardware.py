"""What this machine has and how fast it is: measured, never assumed."""

import math

import pytest
import torch

from offload.entries import TensorEntry
from offload.hardware import measure_decode_bps, measure_rates, peak_rss_bytes, probe
from offload.quantize import Int8

CPU = torch.device("cpu")


def test_memory_is_free_memory():
    hardware = probe("cpu")
    assert 0 < hardware.base_bytes <= peak_rss_bytes()
    assert 0 < hardware.free_bytes <= hardware.total_bytes
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert probe("cpu").base_bytes >= hardware.base_bytes + held.nbytes // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates(dtype):
    rates = measure_rates(CPU, dtype, (1536, 576), rows=17, disk_bps=1e9)
    assert (rates.link_bps, rates.disk_bps) == (math.inf, 1e9)
    assert 1e8 < rates.flops < 1e14
    assert 1e8 < rates.memory_bps < 1e12
    few = measure_rates(CPU, dtype, (1536, 576), rows=1, disk_bps=1e9)
    assert few.flops < 2 * rates.flops  # many rows make better use of the weights


def test_decoding_rate(tmp_path):
    parts = Int8().layout((256, 512))
    scale = TensorEntry("w.scale", tmp_path, 0, 1024, *parts[".scale"])
    entry = TensorEntry("w", tmp_path, 0, 256 * 512, torch.int8, (256, 512), Int8(), (scale,))
    assert 1e6 < measure_decode_bps(entry, torch.bfloat16, CPU) < 1e12
