"""What this machine has and how fast it is: measured, never assumed."""

import math
import os
import threading
import time
from contextlib import nullcontext

import pytest
import torch

from offload import hardware as hardware_module
from offload import store as store_module
from offload.entries import TensorEntry
from offload.hardware import (
    READINGS,
    measure_decode_bps,
    measure_rates,
    measure_read_bps,
    measure_reading,
    peak_rss_bytes,
    probe,
)
from offload.quantize import Int8
from offload.store import Reading

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
    assert 1e6 < measure_decode_bps([entry], torch.bfloat16, CPU) < 1e12


def test_each_kind_of_matrix_counts_for_what_it_holds(monkeypatch):
    """A slow format and a slow shape: the rate is total bytes over total seconds; a kind of few bytes is not timed."""
    seconds = {("fast", 100): 1.0, ("fast", 50): 0.7, ("slow", 40): 5.0}

    def entry(name, rows):
        return TensorEntry(name, None, 0, rows * 8, torch.uint8, (rows, 8), name.split(".")[0])

    timed = []
    monkeypatch.setattr(
        "offload.hardware._decoding_s",
        lambda entry, *_: timed.append(entry.name) or seconds[entry.encoding, entry.shape[0]],
    )
    counted = [entry("fast.1", 100), entry("fast.2", 50), entry("fast.3", 100), entry("slow.1", 40)]
    total = sum(e.nbytes + 4 * e.num_values for e in counted)
    rate = measure_decode_bps([*counted, entry("slow.2", 2)], torch.bfloat16, CPU)
    assert rate == pytest.approx(total / (2 * 1.0 + 0.7 + 5.0))
    assert timed == ["fast.1", "fast.2", "slow.1"]


@pytest.mark.parametrize(("takes_several", "num_requests"), [(True, 4), (False, 1)])
def test_as_many_requests_as_the_disk_takes_at_once(tmp_path, monkeypatch, takes_several, num_requests):
    """A disk that needs 4 ms for every request: one that takes several at once, and one whose head then moves about."""
    genuine, turn, waiting = os.preadv, nullcontext() if takes_several else threading.Lock(), []

    def slow(fd, into, at):
        waiting.append(at)
        with turn:
            time.sleep(0.004 if takes_several else 0.004 * len(waiting))
            waiting.remove(at)
            return genuine(fd, into, at)

    file = tmp_path / "bytes"
    file.write_bytes(os.urandom(12 << 20))
    ways = tuple(Reading(n, 128 << 10) for n in (1, 2, 4))
    monkeypatch.setattr(hardware_module, "READINGS", ways)
    monkeypatch.setattr(hardware_module, "_STRETCH_BYTES", 1 << 20)
    monkeypatch.setattr(store_module.os, "preadv", slow)
    chosen = measure_reading([file], 12 << 20)
    assert chosen == Reading(num_requests, 128 << 10)
    assert measure_reading([file], 13 << 20) == ways[0]
    rate = measure_read_bps([file], 4 << 20, reading=chosen)
    assert rate < 1.1 * num_requests * (128 << 10) / 0.004


def test_a_stretch_is_read_by_as_many_requests_as_a_way_has():
    assert all(hardware_module._STRETCH_BYTES // way.request_bytes >= way.num_requests for way in READINGS[1:])
