"""The guidelines over real models and machines: regimes and lengths worked by hand, and what plan says of them."""

import json
from pathlib import Path

import pytest
import shapes
import torch
from transformers import AutoConfig

from app.advice import Advice, Situation, advice_lines, advise, assumed_lengths, situation
from app.blueprint import Blueprint
from app.forecast import Question, forecast
from app.machines import curves, named_machine

SMALL = AutoConfig.for_model(
    "llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
)


def advice_for(name: str, gpu: str, ram_gb: int, *, bits: int = 16, ctx: int = 4096, draft: str = "none") -> Advice:
    """What a plan with a budget of 64 nodes says of a model and a machine that are not here."""
    config = SMALL if name == "small" else shapes.known_config(name)
    machine = named_machine(gpu, ram_gb << 30, 3e9)
    question = Question(
        Blueprint(name, config, None, None),
        draft,
        None,
        machine,
        ctx=ctx,
        budget=64,
        bits=bits,
        slots=2,
        resident=None,
        dtype=torch.bfloat16,
        device_limit=None,
        ram_limit=None,
    )
    shape, choice = forecast(question)
    return advise(situation(shape, choice, machine.rates, ctx), assumed_lengths(choice.draft.curve))


@pytest.mark.parametrize(
    ("model", "machine", "options", "regime", "binding", "length"),
    [
        # 15.0 GB / 857 GB/s = 17.5 ms; 32 launches of 0.25 ms = 8. Roof 99.1e12 x 2 / (2 x 857e9) = 116 rows.
        ("Llama 3 8B", ("RTX 4090", 64), {}, "memory", "gemm", 115),
        # 15.0 GB / 4080 GB/s = 3.7 ms, 8 ms of launches; no draft, so none pays.
        ("Llama 3 8B", ("H200", 64), {}, "latency", "latency", 0),
        # 15.0 GB / 265 GB/s = 57 ms, 8 of them streamed in 8 GB: over 12.6 GB/s (PCIe 4.0 x8) some 0.6 s.
        ("Llama 3 8B", ("RTX 4060 Laptop 8GB", 64), {}, "link", "link", None),
        # 39 of 80 layers resident, 18.1 GB / 25.2 GB/s = 0.72 s against 0.37 s of decoding and reading.
        ("Llama 3 70B", ("RTX 4090", 64), {"bits": 4}, "link", "link", None),
        # Resident in 141 GB: 139 GB / 4080 GB/s = 34 ms, launches 20 ms. Roof 593.6e12 / 4080e9 = 145.5 rows.
        ("Llama 3 70B", ("H200", 256), {}, "memory", "gemm", 145),
        # 3.0 G of 29.9 G weights in use: 6.06 GB / 2848 GB/s = 2 ms; 48 launches = 12 ms.
        ("Qwen3 30B-A3B", ("H100", 128), {}, "latency", "latency", 0),
        # 42 of 48 layers stream whole: 52.3 GB / 25.2 GB/s = 2.1 s.
        ("Qwen3 30B-A3B", ("3060", 128), {}, "link", "link", None),
        # No GPU: 13.2 GB / 65.3 GB/s = 202 ms, launches 51 ms, arithmetic 26 ms. Roof 0.6e12 / 65.3e9 = 9.2 rows.
        ("Llama 2 7B", ("none", 64), {}, "memory", "gemm", 8),
        # 139 GB in 64 of RAM: 89 GB from a disk of 3 GB/s = 30 s.
        ("Llama 3 70B", ("none", 64), {}, "link", "link", None),
        # 0.27 GB / 857 GB/s = 0.3 ms; 30 launches = 7.5 ms. A copy of itself costs a whole pass per guess: D = 0.
        ("small", ("RTX 4090", 64), {"ctx": 2048, "draft": "self"}, "latency", "latency", 0),
    ],
)
def test_ten_pairs_worked_by_hand(
    model: str, machine: tuple[str, int], options: dict, regime: str, binding: str, length: int | None
) -> None:
    advice = advice_for(model, *machine, **options)
    assert (advice.situation.regime, advice.binding) == (regime, binding)
    if length is not None:
        assert advice.lengths[binding] == length
    assert ("link" in advice.lengths) == (regime == "link")


def where(**changes: object) -> Situation:
    seconds = {"link": 0.0, "memory": 0.01, "attention": 0.0, "latency": 0.0, "compute": 0.0}
    plain = {"regime": "memory", "seconds": seconds, "ctx": 4096, "budget": 64, "full_rows": 200, "group_size": 8}
    return Situation(**{**plain, "num_layers": 32, "layer_ratio": 0.1, "link_nodes": None, **changes})


def test_attention_binds_with_its_start_or_its_tiles() -> None:
    lengths = [1.0] * 9
    assert advise(where(regime="attention", budget=12), lengths).binding == "attention"
    advice = advise(where(regime="attention", budget=64), lengths)
    assert (advice.binding, advice.lengths["tiles"]) == ("tiles", 63)
    assert advise(where(regime="compute"), lengths).binding == "gemm"


def test_a_streamed_target_makes_guesses_cheaper() -> None:
    lengths = assumed_lengths(curves()["model"])
    seconds = {"link": 0.1, "memory": 0.01, "attention": 0.0, "latency": 0.0, "compute": 0.0}
    streamed = where(regime="link", seconds=seconds, link_nodes=500)
    assert where().ratio == pytest.approx(0.1)
    assert streamed.ratio == pytest.approx(0.01)
    # 0.79 a guess: AL / (1 + 0.1 D) is 3.60 / 1.5 = 2.403, 3.85 / 1.6 = 2.405 and 4.04 / 1.7 = 2.376 at D = 5, 6 and 7.
    assert advise(where(), lengths).lengths["latency"] == 6
    assert advise(streamed, lengths).lengths["latency"] > 9
    assert advise(streamed, lengths).lengths[advise(streamed, lengths).binding] == 500
    # AL of D = 7: external (1 - .79^8) / .21 = 4.04, of which 10 % of a pass each leaves 2.4; dspark 3.64 / 1.16 = 3.1
    assert advise(where(), lengths).mechanism == "dspark"
    assert advise(streamed, lengths).mechanism == "external"


def test_words_and_json_agree() -> None:
    advice = advice_for("Llama 3 8B", "RTX 4090", 64)
    text = "\n".join(advice_lines(advice))
    for number in range(1, 6):
        assert f"guideline {number}: " in text
    assert "regime: memory-bound matrices at 4096 tokens of context" in text
    assert "binding: guideline 1, D = 115" in text
    data = json.loads(json.dumps(advice.to_data()))
    assert data["draft_length"] == {"gemm": 115, "attention": 31, "tiles": 63, "latency": 0}
    assert (data["binding"], data["binding_draft_length"], data["group_size"]) == ("gemm", 115, 4)


def test_plan_tells(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from app.cli import main

    shapes.known_config("Llama 3 70B").save_pretrained(tmp_path)
    machine = ["--gpu", "RTX 4090", "--ram", "64GB", "--disk-rate", "3GB/s"]
    assert main(["plan", "--target", str(tmp_path), "--bits", "4", *machine, "--draft", "none", "--json"]) == 0
    text = capsys.readouterr().out
    assert "regime: link-bound (own extension) at 4096" in text
    data = json.loads(text.splitlines()[-1])["guidelines"]
    assert (data["regime"], data["binding"]) == ("link", "link")
    assert f"binding: own extension, D = {data['binding_draft_length']}" in text
