"""The five guidelines with the blog's numbers, and the regime of ten model x machine pairs worked by hand."""

import pytest

from specexec.guidelines import (
    MECHANISMS,
    Speeds,
    Work,
    attention_draft_length,
    attention_intensity,
    best_mechanism,
    draft_overhead,
    expert_coverage,
    expert_rows,
    gemm_draft_length,
    independent_acceptance_length,
    latency_draft_length,
    offload_knee,
    regime,
    speedup,
    tiled_draft_length,
)


@pytest.mark.parametrize(("group_size", "length"), [(8, 15), (32, 3), (4, 31), (16, 7), (128, 0), (256, 0), (1, 127)])
def test_attention_starts_at_128_over_g(group_size: int, length: int) -> None:
    assert attention_draft_length(group_size) == length


def test_seven_drafts_reach_the_roof_with_an_eighth_of_the_batch() -> None:
    for full_rows in (256, 512, 1024):
        assert gemm_draft_length(full_rows // 8, full_rows) == 7
    assert gemm_draft_length(300, 256) == 0
    assert expert_rows(32, 7, num_experts=128, num_used=8) == 16
    assert attention_intensity(8) == 16 and attention_intensity(8, 15) == 256


@pytest.mark.parametrize(
    ("length", "group_size", "tiled"),
    [(10, 8, 10), (15, 8, 15), (20, 8, 15), (31, 8, 31), (40, 8, 31), (9, 32, 7), (64, 3, 41)],
)
def test_beyond_it_tiles_are_filled(length: int, group_size: int, tiled: int) -> None:
    assert tiled_draft_length(length, group_size) == tiled
    assert tiled <= attention_draft_length(group_size) or group_size * (1 + tiled) % 128 == 0


def test_speed_up_and_its_bounds() -> None:
    assert speedup(3.0, 0.1, 5) == pytest.approx(2.0)
    assert speedup(3.0, 0.1, 5, is_serial=False) == pytest.approx(3 / 1.1)
    assert draft_overhead(0.1, 5) == 0.5 and draft_overhead(0.1, 5, is_serial=False) == 0.1
    for length in (0.9, 6.1):
        with pytest.raises(ValueError, match="not between 1 and 1 \\+ 5"):
            speedup(length, 0.1, 5)
    assert independent_acceptance_length(0.5, 2) == 1.75 and independent_acceptance_length(1, 4) == 5


def test_latency_bound_drafts_grow_while_they_pay() -> None:
    lengths = [independent_acceptance_length(0.8, draft_length) for draft_length in range(40)]
    for ratio in (0.02, 0.1, 0.3):
        best = max(range(40), key=lambda d: lengths[d] / (1 + ratio * d))
        assert latency_draft_length(lengths, ratio) == best
    assert latency_draft_length(lengths, 0.3, is_serial=False) == 39
    assert latency_draft_length([1.0, 1.05], 0.1) == 0


def test_mechanisms() -> None:
    assert {each.name for each in MECHANISMS} == {"external", "eagle3", "mtp", "dflash", "dspark", "suffix"}
    assert {each.name for each in MECHANISMS if not each.is_serial} == {"dflash", "dspark", "suffix"}
    assert best_mechanism([("external", 5.0, 0.1), ("dflash", 4.0, 0.1)], 7) == "dflash"
    assert best_mechanism([("external", 7.5, 0.01), ("dflash", 4.0, 0.1)], 7) == "external"


def test_offloading_extension() -> None:
    assert offload_knee(50e12, 2, 25e9) == 2000 and offload_knee(50e12, 0.5, 25e9) == 500
    assert expert_coverage(1, num_experts=128, num_used=8) == pytest.approx(8)
    assert expert_coverage(1000, num_experts=128, num_used=8) == pytest.approx(128)


H100 = Speeds(800e12, 3.3e12, 55e9)
RTX_4090 = Speeds(160e12, 1.0e12, 25e9)
RTX_3060 = Speeds(50e12, 0.36e12, 12e9)
LAPTOP = Speeds(1e12, 50e9, 3e9)  # CPU and NVMe
B200 = Speeds(2200e12, 7.7e12, 110e9)


@pytest.mark.parametrize(
    ("work", "speeds", "rows", "expected"),
    [
        # 8B bf16 resident on an H100: 16e9 / 3.3e12 = 4.8 ms of weights; compute 16e9 / 8e14 = 0.02 ms a row.
        (Work(16e9, 16e9, 0, 0, 0.3e9), H100, 1, "memory"),
        # The same with 300 rows: compute 6 ms.
        (Work(16e9, 16e9, 0, 0, 0.3e9), H100, 300, "compute"),
        # The same, 128 requests at 8k, 128 KB a token: 134e9 / 3.3e12 = 41 ms of KV; compute 128 x .02 = 2.6 ms.
        (Work(16e9, 16e9, 0, 1e9, 134e9), H100, 128, "attention"),
        # 70B 4-bit on a 4090 with 20 of 38 GB streamed: 20e9 / 25e9 = 800 ms; compute 140e9 / 1.6e14 = 0.9 ms a row.
        (Work(140e9, 38e9, 20e9, 0, 1e9), RTX_4090, 64, "link"),
        # The same with 1,024 rows: 0.9 x 1024 = 896 ms.
        (Work(140e9, 38e9, 20e9, 0, 1e9), RTX_4090, 1024, "compute"),
        # 0.5B bf16 resident on a B200 with 1.5 ms of launches: weights 1e9 / 7.7e12 = 0.13 ms.
        (Work(1e9, 1e9, 0, 0, 0.01e9, fixed_s=1.5e-3), B200, 8, "latency"),
        # 30B-A3B bf16 on a 3060, 6 of 60 GB active, half of those streamed: 3e9 / 12e9 = 250 ms; memory 17 ms.
        (Work(6e9, 6e9, 3e9, 0, 0.1e9), RTX_3060, 1, "link"),
        # 8B bf16 from disk on a laptop CPU: 16e9 / 3e9 = 5.3 s; compute 16e9 / 1e12 = 16 ms a row: 64 rows 1.0 s.
        (Work(16e9, 16e9, 16e9, 0, 0.3e9), LAPTOP, 64, "link"),
        # The same with 400 rows: 6.4 s.
        (Work(16e9, 16e9, 16e9, 0, 0.3e9), LAPTOP, 400, "compute"),
        # 1.5B 4-bit resident on the laptop, one row: 0.9e9 / 50e9 = 18 ms of weights; compute 3 ms.
        (Work(3e9, 0.9e9, 0, 0, 0.05e9), LAPTOP, 1, "memory"),
    ],
)
def test_regimes_worked_by_hand(work: Work, speeds: Speeds, rows: int, expected: str) -> None:
    assert regime(work, speeds, rows) == expected
