"""Draft models in few bits: how they can be held, what that takes, and that it is what they are loaded as."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import shapes
import tiny
import torch
from tiny_tokenizer import tiny_tokenizer

import app.launch
from app.blueprint import Blueprint
from app.draft import DraftModel, external_drafts, self_drafts
from app.forecast import Question, forecast
from app.launch import open_session
from app.machines import named_machine
from app.presets import chosen_settings
from app.target import packed
from offload.checkpoint import Checkpoint, open_checkpoint
from offload.hardware import probe
from offload.load import Loaded, load_model, outline
from offload.plan import plan
from offload.quantize import Nf4
from offload.shape import is_quantized

PROMPT = "the cat sat"
GB = 10**9


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    folder = tiny.save(tiny.tiny_model("llama", hidden_size=256, intermediate_size=512), tmp_path / "model")
    tiny_tokenizer().save_pretrained(folder)
    return open_checkpoint(folder)


def loaded(checkpoint: Checkpoint, resident: int) -> Loaded:
    layers = outline(checkpoint, dtype=torch.float32).layers
    return load_model(checkpoint, plan(layers, fixed={}, limit_bytes=2**40, resident=resident), dtype=torch.float32)


def copies(checkpoint: Checkpoint, source: Checkpoint | None = None) -> dict[str, DraftModel]:
    drafts = self_drafts(checkpoint, outline(checkpoint, dtype=torch.float32), torch.float32, source=source)
    return {draft.storage: draft for draft in drafts}


def through_nf4(model: torch.nn.Module, only: tuple[int, ...]) -> torch.nn.Module:
    """The slow obvious version: matrices of the layers `only` encoded and decoded, in place."""
    with torch.no_grad():
        for i in only:
            for name, parameter in model.model.layers[i].named_parameters():
                if is_quantized(model.model.layers[i], name, parameter.shape):
                    parts = Nf4().encode(parameter)
                    Nf4().decode(parts[""], [part for ending, part in parts.items() if ending], parameter)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("resident", [0, 1, 3])
@pytest.mark.parametrize("bits", [32, 8])
def test_a_packed_copy_shares_what_stays_and_has_the_rest_in_few_bits(
    checkpoint: Checkpoint, resident: int, bits: int
) -> None:
    at_rest = checkpoint if bits == 32 else packed(checkpoint, bits, "quantize")
    draft = copies(at_rest, checkpoint)["packed"]
    with loaded(at_rest, resident) as target, loaded(at_rest, 4) as whole, draft.load(target, probe("cpu")) as mine:
        layers = list(zip(target.model.model.layers, mine.model.model.layers, strict=True))
        assert tuple(i for i, (theirs, own) in enumerate(layers) if theirs is own) == target.plan.resident
        expected = logits(whole.model)
        assert torch.equal(logits(target.model), expected)
        if bits == 32:
            plain = through_nf4(tiny.tiny_model("llama", hidden_size=256, intermediate_size=512), target.plan.streamed)
            assert torch.allclose(logits(mine.model), logits(plain), atol=1e-4)
        assert not torch.equal(logits(mine.model), expected)
        assert torch.equal(logits(target.model), expected)
        own = [layers[i][1] for i in target.plan.streamed]
        assert all(each.is_meta == (each.dim() > 1) for layer in own for each in layer.parameters())  # none are held


def test_few_bits_are_few_bytes(checkpoint: Checkpoint) -> None:
    ways = copies(checkpoint)
    fast, small = (sum(layer.resident_bytes for layer in ways[way].shape.layers) for way in ("rounded", "packed"))
    assert fast == sum(layer.resident_bytes for layer in outline(checkpoint, dtype=torch.float32).layers)
    assert small < 0.16 * fast  # 4.1 bits of 32, and norms
    assert ways["rounded"].shape.decoded_bytes == 0 < ways["packed"].shape.decoded_bytes


def test_what_has_few_bits_is_not_packed_anew(checkpoint: Checkpoint) -> None:
    assert set(copies(packed(checkpoint, 4, "quantize"))) == {"rounded"}
    assert set(copies(packed(checkpoint, 8, "quantize"))) == {"rounded"}
    assert set(copies(packed(checkpoint, 8, "quantize"), checkpoint)) == {"rounded", "packed"}


@pytest.mark.parametrize("is_nf4", [False, True])
def test_a_named_draft_can_be_held_in_few_bits_too(checkpoint: Checkpoint, is_nf4: bool) -> None:
    options = {"is_nf4": is_nf4, "ctx": 256, "draft_ctx": None, "note": lambda line: None}
    drafts = external_drafts(checkpoint.path, tiny_tokenizer(), torch.float32, **options)
    assert [draft.storage for draft in drafts] == (["rounded", "packed"] if is_nf4 else ["stored"])
    if is_nf4:
        with loaded(checkpoint, 0) as target, drafts[1].load(target, probe("cpu")) as mine:
            plain = through_nf4(tiny.tiny_model("llama", hidden_size=256, intermediate_size=512), (0, 1, 2, 3))
            assert torch.allclose(logits(mine.model), logits(plain), atol=1e-4)


@pytest.mark.parametrize("way", [0, 1], ids=["rounded", "packed"])
@pytest.mark.parametrize(
    "flags",
    [
        {"draft": "self", "resident": "1"},
        {"draft": "graft", "resident": "1"},
        {"draft": "self", "resident": "1", "bits": "8"},
        {"draft": "self", "resident": "1", "temp": "0.8", "seed": "3"},
        {"draft_bits": "4"},
    ],
    ids=["self", "graft", "int8 target", "T", "named"],
)
def test_the_text_stays_the_same(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], way: int
) -> None:
    for name in ("self_drafts", "external_drafts"):
        make = getattr(app.launch, name)
        monkeypatch.setattr(app.launch, name, lambda *a, make=make, **k: [make(*a, **k)[way]])
    texts, accepted = [], 0
    sampling = {key: flags[key] for key in ("temp", "seed", "bits") if key in flags}
    for each in ({"draft": "none", **sampling}, {"draft": str(checkpoint.path), "budget": "16", **flags}):
        chosen = chosen_settings(None, {"target": str(checkpoint.path), "dtype": "float32", "ctx": "256", **each})
        with open_session(chosen, offline=True, note=lambda line: None) as running:
            session = running.session
            chunks = list(session.stream(session.encode_raw(PROMPT), running.sampling, max_tokens=40))
            texts.append("".join(chunk.text for chunk in chunks))
            accepted = chunks[-1].stats.accepted
    assert texts[0] == texts[1]
    assert accepted > 10


@pytest.mark.parametrize("bits", ["16", "4"])
def test_a_draft_may_compute_in_another_type(checkpoint: Checkpoint, bits: str) -> None:
    """Its copy, too, reads the target's rows, in its own type."""
    texts, own = [], {"draft": str(checkpoint.path), "draft_bits": bits, "draft_dtype": "bfloat16", "budget": "16"}
    for each in ({"draft": "none"}, own):
        chosen = chosen_settings(None, {"target": str(checkpoint.path), "dtype": "float32", "ctx": "256", **each})
        with open_session(chosen, offline=True, note=lambda line: None) as running:
            session = running.session
            chunks = list(session.stream(session.encode_raw(PROMPT), running.sampling, max_tokens=40))
            texts.append("".join(chunk.text for chunk in chunks))
    assert texts[0] == texts[1]
    assert chunks[-1].stats.accepted > 10
    assert (session.target.model.dtype, session.drafter.lm.model.dtype) == (torch.float32, torch.bfloat16)


def test_a_pack_is_made_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    draft = copies(checkpoint)["packed"]
    folder = draft.at_rest().path
    made = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert folder.is_relative_to(tmp_path / "cache") and made
    assert draft.at_rest().path == folder
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == made


def test_room_for_a_pack(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = copies(checkpoint)
    nbytes = ways["packed"].shape.stored_bytes
    assert ways["rounded"].has_room and ways["packed"].has_room
    monkeypatch.setattr("app.target.shutil.disk_usage", lambda place: SimpleNamespace(free=nbytes))
    assert ways["rounded"].has_room and not ways["packed"].has_room
    with monkeypatch.context() as roomy:
        roomy.setattr("offload.pack.shutil.disk_usage", lambda place: SimpleNamespace(free=2**40))
        ways["packed"].at_rest()
    assert ways["packed"].has_room


def asked(name: str, gpu: str, **changes: object) -> Question:
    fields = {"draft": "self", "draft_models": (), "ctx": 4096, "budget": None, "bits": 16, "slots": 2}
    fields |= {"resident": None, "dtype": torch.bfloat16, "device_limit": None, "ram_limit": None} | changes
    machine = named_machine(gpu, 128 * GB, 3e9)
    return Question(Blueprint(name, shapes.known_config(name), None, None), machine=machine, **fields)


def test_a_copy_of_what_is_larger_than_the_memory_is_held_in_few_bits() -> None:
    """SubSpec's idea: 65 GB stream past a 4-bit copy of them, which brings more than n-grams."""
    _, choice = forecast(asked("Qwen3 32B", "RTX 4090", draft="auto"))
    items = dict(choice.plan.items)
    assert choice.draft.kind == "self"
    assert 0.25 * choice.plan.streamed_bytes < items["draft"] < 0.27 * choice.plan.streamed_bytes
    _, ngrams = forecast(asked("Qwen3 32B", "RTX 4090", draft="ngram"))
    assert choice.prediction.tokens_per_s[1] > 2 * ngrams.prediction.tokens_per_s[1]


def test_where_memory_suffices_a_copy_is_not_decoded_again_and_again() -> None:
    shared = {"budget": 16, "resident": 16}
    _, roomy = forecast(asked("Llama 3 8B", "RTX 4090", **shared))
    _, tight = forecast(asked("Llama 3 8B", "RTX 4090", **shared, device_limit=14 * GB))
    assert roomy.draft.shape.decoded_bytes == 0 < tight.draft.shape.decoded_bytes
    assert dict(roomy.plan.items)["draft"] > 3.5 * dict(tight.plan.items)["draft"]
    assert roomy.prediction.draft_s < tight.prediction.draft_s
