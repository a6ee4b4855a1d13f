"""Plans and speeds of machines and models that are not here: memory kept, more never slower, published points met."""

import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import shapes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.blueprint import Blueprint
from app.draft import model_draft, plain_draft
from app.forecast import Question, decide, device_limit, forecast, idle_limits, levers, ram_room
from app.machines import curves, named_machine, read_table
from offload.plan import DoesNotFit, fit, place
from offload.predict import (
    BUDGETS,
    Curve,
    compute_seconds,
    knee,
    link_seconds,
    predict,
)
from offload.shape import anatomy, sketch

GB = 10**9
# Twelve machines, of a laptop's 4 GB up to 140 GB, with main memory from too little to plenty.
MACHINES = [
    ("RTX 3050 Laptop 4GB", 16),
    ("RTX 4060 Laptop 8GB", 32),
    ("RTX 2080", 32),
    ("RTX 2080 Ti", 64),
    ("RTX 3060 12GB", 16),
    ("RTX 4070 Ti", 64),
    ("RTX 4060 Ti 16GB", 32),
    ("RTX 4080", 64),
    ("RTX 3090", 128),
    ("RTX 4090", 64),
    ("RTX 5090", 96),
    ("H200", 256),
    ("none", 64),
]
_parts = cache(lambda name: anatomy(shapes.known_config(name)))
_places = cache(lambda name, bits: place(shaped(name, bits).layers))


@cache
def shaped(name, bits=16):
    return sketch(_parts(name), bits=bits)


def placed(name, bits, machine, *, draft=None, ctx=2048, budgets=BUDGETS, limit=None):
    drafts = [plain_draft("ngram")] if draft is None else [draft]
    hardware = machine.hardware
    return decide(
        shaped(name, bits),
        drafts,
        machine,
        ctx=ctx,
        budgets=budgets,
        slots=2,
        resident=None,
        limit_bytes=device_limit(hardware, limit, None),
        ram_bytes=ram_room(hardware, None),
    )


def with_more(machine, **factors):
    """The machine with some of its memory and rates multiplied."""
    hardware, rates = machine.hardware, machine.rates
    device = int(hardware.free_bytes * factors.get("device", 1))
    ram = int(hardware.ram_free_bytes * factors.get("ram", 1))
    changed = {
        name: getattr(rates, name) * factors.get(name, 1) for name in ("link_bps", "disk_bps", "flops", "memory_bps")
    }
    return replace(
        machine,
        hardware=replace(hardware, free_bytes=device, ram_free_bytes=ram),
        rates=replace(rates, **changed),
    )


@pytest.mark.parametrize(("gpu", "ram"), MACHINES)
def test_every_machine_with_every_model(gpu, ram):
    """Memory is never exceeded, nothing gets slower by more of anything, and a refusal says what is lacking."""
    machine = named_machine(gpu, ram * GB, 3e9)
    for name in shapes.EIGHT:
        for bits in (16, 8, 4):
            try:
                choice = placed(name, bits, machine)
            except DoesNotFit as refusal:
                message = str(refusal)
            else:
                message = None
            if message is not None:
                assert re.fullmatch(r"\d+\.\d\d GB .*are needed at least.*, the limit is \d+\.\d\d GB: .*", message)
                continue
            plan, prediction = choice.plan, choice.prediction
            assert plan.total_bytes <= machine.hardware.free_bytes
            assert sum(nbytes for _, nbytes in plan.host_items) <= machine.hardware.ram_free_bytes
            assert sorted(plan.resident + plan.streamed) == list(range(len(shaped(name, bits).layers)))
            assert plan.ram_bytes <= plan.streamed_bytes
            assert len(plan.tiers) == len(plan.streamed)
            assert [dict(plan.items)["embedding"], dict(plan.host_items).get("embedding", 0)] in (
                [shaped(name, bits).embedding_bytes, 0],
                [0, shaped(name, bits).embedding_bytes],
            )
            assert not (plan.gathers_on_host and shaped(name, bits).is_tied)
            assert prediction.s_per_pass >= prediction.compute_s > 0
            low, likely, high = prediction.tokens_per_s
            assert 0 < low <= likely <= high
            for resource in ("device", "ram", "link_bps", "disk_bps", "flops", "memory_bps"):
                better = placed(name, bits, with_more(machine, **{resource: 1.5})).prediction
                assert better.tokens_per_s[1] >= likely * (1 - 1e-9), (name, bits, resource)


@given(
    st.sampled_from(["Llama 3 70B", "gpt-oss 20B", "Qwen3 30B-A3B"]),
    st.sampled_from([16, 4]),
    st.dictionaries(st.sampled_from(["device", "ram", "link_bps", "disk_bps", "flops", "memory_bps"]), st.floats(1, 4)),
    st.integers(6, 40),
    st.integers(2, 100),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_more_is_never_slower(name, bits, factors, device, ram, is_self):
    base = named_machine("RTX 3090", ram * GB, 2e9)
    machine = replace(base, hardware=replace(base.hardware, free_bytes=device * GB))
    draft = (
        model_draft("self", shaped(name), is_self=True) if is_self else model_draft("model", shaped("Llama 3 8B", 4))
    )
    try:
        before = placed(name, bits, machine, draft=draft)
    except DoesNotFit:
        return
    after = placed(name, bits, with_more(machine, **factors), draft=draft)
    assert after.prediction.tokens_per_s[1] >= before.prediction.tokens_per_s[1] * (1 - 1e-9)


def test_published_70b_in_4_bits_on_a_4090():
    """A peer's design takes 1.9 s: layers resident from the first on, and a wait after each, so that times add up."""
    machine = named_machine("RTX 4090", 64 * GB, 3e9)
    draft = model_draft("model", shaped("Llama 3 8B", 4))
    choice = placed("Llama 3 70B", 4, machine, draft=draft, budgets=(504,))
    prediction = choice.prediction
    assert prediction.link_s + prediction.compute_s == pytest.approx(1.9, rel=0.2)
    assert prediction.s_per_pass == pytest.approx(1.1, rel=0.2)
    assert 5 < prediction.tokens_per_s[1] < 14


def test_published_llama_2_70b_in_16_bits():
    """More than five seconds per token on PCIe 4.0 without speculation; two to three tokens per second with it."""
    machine = named_machine("RTX 4090", 256 * GB, 3e9)
    target = shaped("Llama 2 70B")
    streamed = place(target.layers, resident=0)
    everything = fit(streamed, fixed={}, limit_bytes=25 * GB, ram_bytes=200 * GB)
    none = predict(target, everything, plain_draft("none"), 1, machine.rates)
    assert 1 / none.tokens_per_s[1] > 5
    draft = model_draft("model", sketch(_parts("Llama 2 7B"), bits=16))
    assert 1.6 < placed("Llama 2 70B", 16, machine, draft=draft).prediction.tokens_per_s[1] < 3.6


def test_the_knee_is_where_the_formula_says():
    """N* = FLOPS x bytes per weight / (2 x link rate) where everything streams in 16 bits."""
    machine = named_machine("RTX 4090", 256 * GB, 3e9)
    target = shaped("Llama 2 70B")
    plan = fit(place(target.layers, resident=0), fixed={}, limit_bytes=25 * GB, ram_bytes=200 * GB)
    rates = machine.rates
    nodes = knee(target, plan, rates)
    assert nodes == pytest.approx(rates.flops * 2 / (2 * rates.link_bps), rel=0.02)
    assert compute_seconds(target, nodes, rates) == pytest.approx(link_seconds(plan, rates), rel=0.02)


def test_a_link_that_shares_the_memory_slows_computing_down():
    machine = named_machine("RTX 4090", 256 * GB, 3e9)
    target = shaped("Llama 2 70B")
    plan = fit(place(target.layers, resident=0), fixed={}, limit_bytes=25 * GB, ram_bytes=200 * GB)
    none, shared = plain_draft("none"), replace(machine.rates, link_cost=0.2)
    bound = predict(target, plan, none, 8 * knee(target, plan, machine.rates), shared)
    assert bound.s_per_pass == pytest.approx(bound.compute_s + 0.2 * bound.link_s)
    assert predict(target, plan, none, 1, shared) == predict(target, plan, none, 1, machine.rates)


def test_what_does_not_fit_in_main_memory_comes_from_the_disk():
    target = shaped("Llama 3 70B", 4)
    tiers = []
    for ram in (8, 16, 24, 64):
        machine = named_machine("RTX 2080 Ti", ram * GB, 3e9)
        plan = placed("Llama 3 70B", 4, machine).plan
        in_ram = plan.tiers.count("ram")
        assert dict(plan.host_items)["arena"] == in_ram * target.layers[0].slot_bytes
        assert ("staging" in dict(plan.host_items)) == (plan.tier == "disk")
        from_disk = plan.streamed_bytes - plan.ram_bytes
        expected = plan.ram_bytes / machine.rates.link_bps + from_disk / 3e9
        assert link_seconds(plan, machine.rates) == pytest.approx(expected)
        tiers.append(in_ram)
    assert tiers == sorted(tiers)
    assert tiers[0] < tiers[-1] == len(plan.streamed)
    with pytest.raises(DoesNotFit, match=r"main memory are needed at least .* --ram-limit"):
        placed("Llama 3 70B", 16, named_machine("RTX 4090", 2 * GB, 3e9))


def test_draft_caches_logits_and_other_programs_are_counted():
    """The fault that estimates of others have: weights alone."""
    machine = named_machine("RTX 4090", 64 * GB, 3e9)
    draft = model_draft("model", shaped("Llama 3 8B"))
    plan = placed("Llama 3 70B", 4, named_machine("RTX 5090"), draft=draft, budgets=(1023,), ctx=4096).plan
    items = dict(plan.items)
    assert items["logits"] == 1024 * 128256 * 2
    assert items["draft's logits"] == 1024 * 128256 * 4
    assert items["draft"] == pytest.approx(16.1e9, rel=0.01)
    assert items["KV cache"] == 2 * 80 * 8 * 128 * (4096 + 1023) * 2
    assert items["draft's KV cache"] == 2 * 32 * 8 * 128 * (4096 + 1023) * 2
    busy = replace(machine, hardware=replace(machine.hardware, free_bytes=machine.hardware.free_bytes - 4 * GB))
    small = model_draft("model", shaped("Llama 3 8B", 4))
    kept = [dict(placed("Llama 3 70B", 4, each, draft=small).plan.items) for each in (machine, busy)]
    ample, scarce = (items["resident layers"] + items["embedding"] for items in kept)
    assert ample - 5 * GB < scarce < ample - 3 * GB


def test_a_copy_of_the_target_costs_what_the_target_does_not_keep():
    draft = model_draft("self", shaped("Llama 3 8B"), is_self=True)
    each = shaped("Llama 3 8B").layers[0].resident_bytes
    kept = []
    for gigabytes in (18, 19, 24, 40):
        plan = placed("Llama 3 8B", 16, named_machine("H200"), draft=draft, budgets=(64,), limit=gigabytes * GB).plan
        items = dict(plan.items)
        assert sum(items.values()) == plan.total_bytes <= gigabytes * GB
        assert items["draft"] == each * (len(plan.streamed) or 32)
        kept.append(len(plan.resident))
    assert kept == sorted(kept) and kept[-1] == 32


def test_draft_and_budget_are_chosen_together():
    machine = named_machine("RTX 4090", 64 * GB, 3e9)
    target = shaped("Llama 3 70B", 4)
    drafts = [plain_draft("none"), plain_draft("ngram"), model_draft("small", shaped("Llama 3 8B", 4))]

    def best(options, budgets=BUDGETS):
        hardware = machine.hardware
        return decide(
            target,
            options,
            machine,
            ctx=2048,
            budgets=budgets,
            slots=2,
            resident=None,
            limit_bytes=device_limit(hardware, None, None),
            ram_bytes=ram_room(hardware, None),
        )

    choice = best(drafts)
    assert choice.draft.kind == "small"
    alone = [best([draft], (budget,)) for draft in drafts for budget in BUDGETS]
    assert choice.prediction.tokens_per_s[1] == max(each.prediction.tokens_per_s[1] for each in alone)


def on_device(target):
    """The same sizes, of a model whose embedding has to stay where the head is."""
    config = deepcopy(target.config)
    config.tie_word_embeddings = True
    return replace(target, config=config)


def planned(target, draft, machine, *, limit=None, ram=None):
    return decide(
        target,
        [draft],
        machine,
        ctx=2048,
        budgets=BUDGETS,
        slots=2,
        resident=None,
        limit_bytes=device_limit(machine.hardware, limit, None),
        ram_bytes=ram_room(machine.hardware, ram),
    )


@pytest.mark.parametrize(("bits", "draft_bits"), [(16, 4), (4, 16)])
def test_an_embedding_in_main_memory_leaves_room_for_layers(bits, draft_bits):
    machine, target = named_machine("RTX 4090", 256 * GB, 3e9), shaped("Llama 3 70B", bits)
    draft = model_draft("model", shaped("Llama 3 8B", draft_bits))
    choice, without = planned(target, draft, machine), planned(on_device(target), draft, machine)
    assert choice.plan.gathers_on_host and not without.plan.gathers_on_host
    assert dict(choice.plan.host_items)["embedding"] == dict(without.plan.items)["embedding"] == 128256 * 8192 * 2
    spared = without.plan.streamed_bytes - choice.plan.streamed_bytes
    each = target.layers[0].slot_bytes
    assert spared % each == 0 and abs(spared - 128256 * 8192 * 2) < each
    assert choice.prediction.tokens_per_s[1] > without.prediction.tokens_per_s[1]


def test_the_embedding_stays_where_nothing_is_gained():
    target, draft = shaped("Llama 3 70B", 4), model_draft("model", shaped("Llama 3 8B", 4))
    copy = model_draft("self", shaped("Llama 3 8B", 4), is_self=True)
    small = named_machine("RTX 4090", 64 * GB, 3e9)
    for chosen in (
        planned(target, draft, named_machine("H200", 64 * GB, 3e9)),  # all of it fits
        planned(target, draft, named_machine("none", 32 * GB, 3e9)),  # there is one memory
        planned(target, draft, small, ram=2 * GB),  # main memory is too small, and layers come from the disk
        planned(shaped("Llama 3 8B"), copy, small, limit=12 * GB),  # recorded steps cannot wait for the host
        planned(shaped("Qwen3 4B"), draft, named_machine("RTX 3060 12GB", 64 * GB, 3e9), limit=9 * GB),  # tied
    ):
        assert not chosen.plan.gathers_on_host
        assert chosen.plan.streamed or chosen.plan.limit_bytes > 60 * GB


@pytest.mark.parametrize("ram", range(2, 44, 3))
def test_main_memory_goes_to_the_embedding_or_to_layers(ram):
    """Whatever there is of it, the better of both ways is taken, and more is never slower."""
    target, draft = shaped("Llama 3 70B", 4), model_draft("model", shaped("Llama 3 8B", 4))
    machine = named_machine("RTX 4090", 64 * GB, 3e9)
    chosen, without, more = (
        planned(each, draft, machine, ram=nbytes).prediction.tokens_per_s[1]
        for each, nbytes in ((target, ram * GB), (on_device(target), ram * GB), (target, (ram + 1) * GB))
    )
    assert without <= chosen <= more * (1 + 1e-9)


def test_an_embedding_in_main_memory_may_be_what_makes_it_fit():
    target, machine, draft = shaped("Llama 3 70B", 4), named_machine("RTX 4090", 64 * GB, 3e9), plain_draft("ngram")
    with pytest.raises(DoesNotFit, match=r"embedding 2.10 GB") as refusal:
        planned(on_device(target), draft, machine, limit=GB)
    needed = float(str(refusal.value).partition(" GB are needed at least")[0])
    with pytest.raises(DoesNotFit) as refusal:
        planned(target, draft, machine, limit=GB)
    least = float(str(refusal.value).partition(" GB are needed at least")[0])
    assert least == pytest.approx(needed - 2.1, abs=0.02)  # all three are rounded
    assert planned(target, draft, machine, limit=round((needed - 2) * GB)).plan.gathers_on_host


def test_rows_that_cross_take_their_time():
    target, machine, none = shaped("Llama 3 70B", 4), named_machine("RTX 4090", 64 * GB, 3e9), plain_draft("none")
    placements = place(target.layers, resident=8)
    plans = [
        fit(placements, fixed={}, limit_bytes=25 * GB, ram_bytes=60 * GB, on_host=each)
        for each in ({}, {"embedding": GB})
    ]
    alone, gathered = (predict(target, each, none, 63, machine.rates).s_per_pass for each in plans)
    assert gathered - alone == pytest.approx(64 * 8192 * 2 / 2e9)


def test_curves_rise_and_name_their_source():
    for kind, curve in curves().items():
        assert curve.source
        found = [curve.tokens_per_pass(budget) for budget in (1, 5, 16, 40, 64, 200, 504, 1024, 4096)]
        for low, likely, high in found:
            assert 1 <= low <= likely <= high
        for before, after in pairwise(found):
            assert all(a <= b for a, b in zip(before, after, strict=True)), kind


def test_between_two_known_budgets():
    curve = Curve({16: (4.0, 4.0, 4.0), 64: (6.0, 6.0, 6.0)}, {}, "made up")
    assert curve.tokens_per_pass(32)[1] == pytest.approx(5)
    assert (curve.tokens_per_pass(2)[1], curve.tokens_per_pass(999)[1], curve.num_steps(64)) == (4, 6, 0)


def question(name, machine, **changes):
    fields = {
        "draft": "ngram",
        "draft_models": (),
        "ctx": 4096,
        "budget": None,
        "bits": 16,
        "slots": 2,
        "resident": None,
    }
    fields |= {"dtype": torch.bfloat16, "device_limit": None, "ram_limit": None} | changes
    return Question(Blueprint(name, shapes.known_config(name), None, None), machine=machine, **fields)


def test_levers_help_as_much_as_they_say():
    asked = question("Llama 3 70B", named_machine("RTX 4090", 64 * GB, 3e9))
    _, choice = forecast(asked)
    found = levers(asked, choice)
    gains = [lever.gain for lever in found]
    assert gains == sorted(gains, reverse=True)
    four = next(lever for lever in found if "bits" in lever.flags)
    assert four.flags == {"bits": "4"}
    _, other = forecast(replace(asked, bits=4))
    assert four.gain == pytest.approx(other.prediction.tokens_per_s[1] / choice.prediction.tokens_per_s[1])
    assert {"draft", "bits", "ram"} <= {flag for lever in found for flag in lever.flags}


@pytest.mark.parametrize(("gpu", "limit"), [("none", 2 * GB), ("RTX 4090", 2 * GB)])
def test_a_refusal_names_what_the_cheapest_draft_needs(gpu, limit):
    asked = question("Llama 3 70B", named_machine(gpu, 64 * GB, 3e9), draft="auto", bits=4, device_limit=limit)
    with pytest.raises(DoesNotFit) as refusal:
        forecast(asked)
    needed = refusal.value.needed_bytes
    assert f"{needed / GB:.2f} GB are needed at least" in str(refusal.value)
    forecast(replace(asked, device_limit=needed))
    with pytest.raises(DoesNotFit):
        forecast(replace(asked, device_limit=needed - 1))


def test_main_memory_is_offered_for_machines_that_are_not_here():
    machine = named_machine("RTX 4090", 16 * GB, 3e9)
    for asked, flag in [
        (question("Llama 3 70B", machine, bits=4), "ram"),
        (question("Llama 3 70B", machine, bits=4, ram_limit=8 * GB), "ram-limit"),
        (question("Llama 3 70B", replace(machine, is_named=False), bits=4), None),
    ]:
        offered = {flag for lever in levers(asked, forecast(asked)[1]) for flag in lever.flags}
        assert offered & {"ram", "ram-limit"} == ({flag} if flag else set())


@pytest.mark.parametrize(("gpu", "ram_counts"), [("RTX 4090", False), ("none", True)])
def test_limits_beyond_the_machine_change_nothing(gpu, ram_counts):
    hardware = named_machine(gpu, 64 * GB, 3e9).hardware
    room = device_limit(hardware, None, None)
    assert device_limit(hardware, 10**14, 10**14) == room <= hardware.free_bytes
    assert device_limit(hardware, GB, None) == GB
    assert device_limit(hardware, None, GB) == (GB if ram_counts else room)
    assert [line.split()[0] for line in idle_limits(hardware, 10**14, 10**14)] == ["--device-limit", "--ram-limit"]
    assert idle_limits(hardware, room, GB) == idle_limits(hardware, None, None) == []


def test_the_smallest_change_that_makes_it_fit():
    asked = question("Llama 3 70B", named_machine("RTX 3050 Laptop 4GB", 64 * GB, 3e9))
    with pytest.raises(DoesNotFit):
        forecast(asked)
    found = levers(asked, None)
    assert found == [] or found[0].gain is None
    asked = question("Llama 2 13B", named_machine("RTX 3050 Laptop 4GB", 64 * GB, 3e9), ctx=4096)
    with pytest.raises(DoesNotFit):
        forecast(asked)
    assert levers(asked, None)[0].flags in ({"ctx": "2048"}, {"ctx": "1024"}, {"ctx": "512"})


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx-2080ti", "RTX 2080 Ti"),
        ("2080", "RTX 2080"),
        ("3060", "RTX 3060 12GB"),
        ("h100", "H100"),
        ("none", "CPU"),
    ],
)
def test_machines_by_name(asked, found):
    assert named_machine(asked).hardware.name == found


def test_an_unknown_machine_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean RTX 4090"):
        named_machine("RTX 4091")
    with pytest.raises(ValueError, match="known are"):
        named_machine("teapot")


def test_the_table_of_machines_is_whole():
    table = read_table("hardware")
    assert len(table["gpu"]) >= 12
    for gpu in table["gpu"]:
        assert gpu["source"]
        machine = named_machine(gpu["name"])
        assert machine.hardware.name == gpu["name"]
        assert machine.hardware.has_bf16 == (not gpu["name"].startswith("RTX 2080"))
        assert 5e9 < machine.rates.link_bps < 60e9
        assert machine.rates.link_bps < machine.rates.memory_bps
