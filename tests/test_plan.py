"""The plan as a function: what fits, evenly spread, monotone, and what is said when nothing fits."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.layout import Extent, Unit
from offload.plan import DoesNotFit, beside_copy, fit, kv_cache_bytes, logits_bytes, place, plan

MB = 1 << 20


def layer(i, megabytes, signature="same", workspace=0):
    extent = Extent(None, 0, megabytes * MB, 0)
    return Unit(f"layer {i}", (), (extent,), frozenset(), workspace * MB, workspace * MB, (signature,))


ALIKE = [layer(i, 10) for i in range(12)]


def test_everything_stays_when_it_fits():
    chosen = plan(ALIKE, fixed={"head": 5 * MB}, limit_bytes=125 * MB)
    assert chosen.resident == tuple(range(12))
    assert chosen.streamed == ()
    assert chosen.streamed_bytes == 0
    assert chosen.total_bytes == 125 * MB
    assert dict(chosen.items)["slots"] == 0


def test_residents_are_spread_evenly_and_slots_are_paid_for():
    chosen = plan(ALIKE, fixed={"head": 5 * MB}, limit_bytes=68 * MB)
    assert chosen.resident == (1, 4, 7, 10)
    items = dict(chosen.items)
    assert (items["head"], items["resident layers"], items["slots"]) == (5 * MB, 40 * MB, 20 * MB)
    assert chosen.total_bytes <= chosen.limit_bytes


def test_exact_number_of_residents():
    assert len(plan(ALIKE, fixed={}, limit_bytes=10**9, resident=3).resident) == 3
    assert plan(ALIKE, fixed={}, limit_bytes=10**9, resident=0, num_slots=3).num_slots == 3
    with pytest.raises(DoesNotFit):
        plan(ALIKE, fixed={}, limit_bytes=50 * MB, resident=4)


@pytest.mark.parametrize("wrong", [{"resident": 13}, {"resident": -1}, {"num_slots": 0}])
def test_numbers_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=r"layers|slot"):
        plan(ALIKE, fixed={}, limit_bytes=10**9, **wrong)


def test_does_not_fit_says_what_is_needed_what_there_is_and_what_to_try():
    with pytest.raises(DoesNotFit) as caught:
        plan(ALIKE, fixed={"draft": 1000 * MB}, limit_bytes=900 * MB)
    message = str(caught.value)
    for words in ("1.07 GB", "draft 1.05 GB", "slots 0.02 GB", "limit is 0.94 GB", "smaller draft"):
        assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"resident": 12}, "keep fewer than 12 layers resident, shorten"),
        ({"resident": 0, "num_slots": 11}, "take fewer than 11 slots, shorten"),
        ({"resident": 0}, "if it is set), shorten the context or lower the budget"),
    ],
)
def test_does_not_fit_names_what_was_asked_for(asked, words):
    with pytest.raises(DoesNotFit) as caught:
        plan(ALIKE, fixed={"head": 5 * MB}, limit_bytes=20 * MB, **asked)
    assert words in str(caught.value)
    assert "draft" not in str(caught.value)
    assert plan(ALIKE, fixed={"head": 5 * MB}, limit_bytes=caught.value.needed_bytes, **asked).total_bytes


def test_a_lone_fat_layer_has_a_slot_to_itself_and_is_read_once():
    layers = [layer(0, 100, "fat"), *(layer(i, 10) for i in range(1, 12))]
    chosen = plan(layers, fixed={}, limit_bytes=120 * MB)
    assert dict(chosen.items)["slots"] == 120 * MB
    assert chosen.streamed_bytes == 110 * MB


def test_two_layers_need_no_ring_of_two_slots():
    chosen = plan(ALIKE[:2], fixed={}, limit_bytes=20 * MB)
    assert (chosen.resident, chosen.streamed) == ((0, 1), ())


def test_layers_computed_in_a_wider_type():
    layers = [layer(i, 10, workspace=20) for i in range(12)]
    items = dict(plan(layers, fixed={}, limit_bytes=10**9, resident=0).items)
    assert (items["slots"], items["layer workspace"], items["load buffer"]) == (20 * MB, 20 * MB, 0)
    items = dict(plan(layers, fixed={}, limit_bytes=10**9, resident=12).items)
    assert (items["resident layers"], items["load buffer"]) == (240 * MB, 10 * MB)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from("abc"), st.booleans()), min_size=1, max_size=14),
    st.integers(1, 3),
    st.integers(0, 600),
    st.integers(0, 200),
)
def test_more_memory_never_streams_more(shapes, num_slots, megabytes, more):
    sizes = {}
    layers = []
    for i, (size, kind, wide) in enumerate(shapes):
        workspace = sizes.setdefault(kind, 2 * size if wide else 0)
        layers.append(layer(i, size, kind, workspace))

    def streamed(limit):
        try:
            chosen = plan(layers, fixed={"base": 7 * MB}, limit_bytes=limit * MB, num_slots=num_slots)
        except DoesNotFit:
            return float("inf")
        assert chosen.total_bytes <= limit * MB
        assert sorted(chosen.resident + chosen.streamed) == list(range(len(layers)))
        return chosen.streamed_bytes

    assert streamed(megabytes + more) <= streamed(megabytes)


@pytest.mark.parametrize("copied", [4 * MB, 10 * MB, 40 * MB])
def test_a_copy_that_drafts_holds_the_streamed_layers_only(copied):
    placements = [beside_copy(each, [copied] * 12) for each in place(ALIKE)]
    assert [dict(each.items)["draft"] // copied for each in placements] == [*range(12, 0, -1), 12]
    before = 13
    for limit in range(20, 700, 5):
        try:
            chosen = fit(placements, fixed={"head": 5 * MB}, limit_bytes=limit * MB)
        except DoesNotFit:
            assert before == 13
            continue
        items = dict(chosen.items)
        assert sum(items.values()) <= limit * MB
        assert items["draft"] == copied * (len(chosen.streamed) or 12)
        assert len(chosen.streamed) <= before
        before = len(chosen.streamed)
    assert before == 0


def test_what_main_memory_holds_beside_layers():
    def held(ram, limit=60):
        on_host = {"embedding": 30 * MB}
        chosen = fit(place(ALIKE), fixed={}, limit_bytes=limit * MB, ram_bytes=ram * MB, on_host=on_host)
        assert chosen.gathers_on_host
        return {name: nbytes // MB for name, nbytes in chosen.host_items}

    assert not fit(place(ALIKE), fixed={}, limit_bytes=60 * MB).gathers_on_host
    assert held(30, limit=120) == {"embedding": 30}  # every layer stays
    assert held(110) == {"embedding": 30, "arena": 80}
    assert held(109) == {"embedding": 30, "arena": 50, "staging": 20}
    assert held(50) == {"embedding": 30, "arena": 0, "staging": 20}
    with pytest.raises(DoesNotFit, match=r"main memory are needed at least .*embedding \(0.03 GB\).*--ram-limit"):
        held(49)


def test_cache_and_logits_of_a_real_shape():
    config = tiny.tiny_config("qwen3", num_hidden_layers=3)
    assert kv_cache_bytes(config, 100, torch.bfloat16) == 2 * 3 * 2 * 32 * 100 * 2
    assert logits_bytes(config, 64, torch.float32) == 320 * 64 * 4


def test_plan_is_a_value():
    chosen = plan(ALIKE, fixed={}, limit_bytes=10**9)
    assert replace(chosen) == chosen
