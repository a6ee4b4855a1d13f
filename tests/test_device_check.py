"""The device check: every part of it runs small on the CPU, and at full size where there is a GPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TARGETS = ("70B NF4", "32B 16 bits")


@pytest.fixture(scope="module")
def device_check():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import device_check

        yield device_check
    del sys.modules["device_check"]


@pytest.fixture(scope="module")
def found(device_check):
    return device_check.check(torch.device("cpu"), is_tiny=True)


def test_rates_are_measured_and_everything_fits_in_json(found):
    assert json.loads(json.dumps(found))["device"].startswith("CPU")
    assert found["copy"]["pageable_bps"] > 0
    assert found["copy"]["pinned_bps"] is None


def test_streamed_logits_equal_resident_ones(found):
    ways = ("ram", "disk", "embedding in main memory")
    assert found["equal_logits"] == dict.fromkeys([f"{bits} bits, {way}" for bits in (16, 4) for way in ways], True)


def test_copies_and_compute_keep_their_order_and_faults_are_noticed(found):
    assert len(found["ordering"]) == 8
    assert sum("control" in name for name in found["ordering"]) == 4
    assert all(found["ordering"].values()), found["ordering"]


def test_draft_steps_are_timed_plain_and_in_frames(found):
    steps = found["draft_steps"]
    assert steps["error"] < 1e-5 and steps["notes"] == []
    assert steps["ratio"] == pytest.approx(steps["framed_s"] / steps["plain_s"])


@pytest.mark.parametrize("target", TARGETS)
def test_planned_against_actual_under_two_caps(device_check, found, target):
    cases = list(found[target].values())
    assert [(case["num_resident"], case["num_streamed"]) for case in cases] == [(0, 4), (1, 3)]
    for case in cases:
        assert case["planned_peak_bytes"] <= case["cap_bytes"]
        assert list(case["budgets"]) == list(device_check.TINY_BUDGETS)
        for each in case["budgets"].values():
            assert each["s_per_pass"] > 0
            link_s, compute_s = each["planned_link_s"], each["planned_compute_s"]
            assert max(link_s, compute_s) <= each["planned_s_per_pass"] <= link_s + compute_s
            assert 0 < each["link_utilisation"] < 1


def test_a_cap_that_is_too_small_is_told_not_raised(device_check, tmp_path):
    config = device_check.AutoConfig.for_model("llama", **device_check._TINY)
    checkpoint = device_check.store_random(tmp_path, config, bits=4, dtype=torch.bfloat16, is_shared=True)
    cases = device_check.pass_times(
        checkpoint, torch.device("cpu"), 1e9, caps=(1_000_000,), budgets=(1,), deadline=float("inf")
    )
    assert "are needed at least" in cases["0.001 GB"]["failed"]


def test_the_cpu_is_asked_for_in_small_only(device_check, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["device_check.py", "--device", "cpu"])
    with pytest.raises(SystemExit, match="--tiny"):
        device_check.main()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run benchmarks/device_check.py there")
def test_everything_on_the_gpu(device_check):
    found = device_check.check(torch.device("cuda", 0), is_tiny=False)
    assert all(found["equal_logits"].values())
    assert all(found["ordering"].values())
    assert found["draft_steps"]["notes"] == [] and found["draft_steps"]["error"] < 0.05
    total = torch.cuda.get_device_properties(0).total_memory
    for case in (case for target in TARGETS for case in found[target].values()):
        if case["cap_bytes"] <= total:
            assert "failed" not in case, case["failed"]
            assert case["peak_bytes"] <= case["cap_bytes"]
