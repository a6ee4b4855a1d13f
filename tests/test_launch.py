"""Sessions as they are opened: drafts of other tokenizers, with fewer positions, and drafts that do not pay."""

import json
import string
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from tiny_tokenizer import SPECIALS, tiny_tokenizer, word_tokenizer

from app.launch import Running, open_session
from app.presets import chosen_settings
from app.session import Chunk
from specexec.drafters.translate import TranslatedLM, common_tokens
from specexec.drafters.window import WindowedLM

FLAGS = {"dtype": "float32", "ctx": "256"}
OTHER = tiny_tokenizer(["<x>", *SPECIALS])  # every id is another one's


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path / "cache"))


def twins(directory: Path) -> tuple[Path, Path]:
    """A model that says hardly anything but capitals, which no tokenizer here merges, and its copy under other ids."""
    target, draft = tiny.tiny_model("llama"), tiny.tiny_model("llama")
    ours = tiny_tokenizer()
    capitals = torch.tensor([ours.get_vocab()[letter] for letter in string.ascii_uppercase])
    kept = 4 * target.lm_head.weight[capitals]
    target.lm_head.weight.zero_()[capitals] = kept
    to_draft = common_tokens(ours.get_vocab(), OTHER.get_vocab(), tiny.VOCAB)
    common = np.flatnonzero(to_draft >= 0)
    for mine, theirs in ((target.model.embed_tokens, draft.model.embed_tokens), (target.lm_head, draft.lm_head)):
        theirs.weight.zero_()[to_draft[common]] = mine.weight[common].clone()
    for model, tokenizer, name in ((target, ours, "target"), (draft, OTHER, "draft")):
        tokenizer.save_pretrained(directory / name)
        tiny.save(model, directory / name)
    return directory / "target", directory / "draft"


def answer(target: Path, notes: list[str], prompt: str = "the cat sat", **flags: str) -> tuple[str, Chunk, Running]:
    chosen = chosen_settings(None, {**FLAGS, "target": str(target), "max_tokens": "40", **flags})
    with open_session(chosen, offline=True, note=notes.append) as running:
        session = running.session
        chunks = list(session.stream(session.encode_raw(prompt), running.sampling, max_tokens=40))
        return "".join(chunk.text for chunk in chunks), chunks[-1], running


@pytest.mark.parametrize("sampling", [{}, {"temp": "0.8", "seed": "4"}], ids=["greedy", "T"])
def test_a_draft_of_another_tokenizer(tmp_path: Path, sampling: dict[str, str]) -> None:
    (target, draft), notes = twins(tmp_path), []
    plain, _, _ = answer(target, [], draft="none", **sampling)
    text, last, running = answer(target, notes, draft=str(draft), budget="16", **sampling)
    assert text == plain
    assert last.stats.accepted > 20  # of 40 tokens
    assert isinstance(running.session.drafter.lm, TranslatedLM)
    (note,) = notes
    ours = tiny_tokenizer().get_vocab()
    common = len(ours.keys() & OTHER.get_vocab().keys())
    assert note == f"draft: another tokenizer; it can guess the {common} of {len(ours)} tokens that both have"


def test_too_few_common_tokens_name_the_first_that_differs(chat_model: Path, tmp_path: Path) -> None:
    word_tokenizer().save_pretrained(tmp_path)
    tiny.save(tiny.tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError, match="id 0 is '<bos>' in the draft and '<pad>' in the target, and too few tokens"):
        answer(chat_model, [], draft=str(tmp_path))


def test_a_draft_may_see_the_tail_only(chat_model: Path) -> None:
    plain, _, _ = answer(chat_model, [], draft="none", prompt="the cat " * 10)
    notes: list[str] = []
    text, last, running = answer(
        chat_model,
        notes,
        draft=str(chat_model),
        draft_ctx="12",
        budget="8",
        prompt="the cat " * 10,
    )
    assert text == plain
    assert notes == ["draft: it sees the last 12 tokens only"]
    lm = running.session.drafter.lm
    assert isinstance(lm, WindowedLM)
    assert lm._lm.max_rows == 12 + 8 and last.stats.prompt_tokens > 12
    kv_cache = dict(running.plan.items)
    assert kv_cache["draft's KV cache"] * (256 + 8) == kv_cache["KV cache"] * (12 + 8)


def test_fewer_positions_than_the_context_make_it_so(chat_model: Path, tmp_path: Path) -> None:
    short, notes = tiny.save(tiny.tiny_model("llama", max_position_embeddings=64), tmp_path), []
    tiny_tokenizer().save_pretrained(short)
    plain, _, _ = answer(chat_model, [], draft="none", prompt="the cat " * 40)
    text, last, running = answer(chat_model, notes, draft=str(short), budget="64", prompt="the cat " * 40)
    assert (text, notes) == (plain, ["draft: it sees the last 48 tokens only"])
    assert running.session.drafter.lm._lm.max_rows == 64 and last.stats.prompt_tokens > 64
    assert last.stats.accepted > 0
    with pytest.raises(ValueError, match="--draft-ctx 100 is more than the 64 positions"):
        answer(chat_model, [], draft=str(short), draft_ctx="100")


@pytest.mark.parametrize("num_layers", [1, 12], ids=["tried", "too slow to be tried at once"])
def test_a_draft_that_does_not_pay_is_switched_off_and_said_once(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture, num_layers: int
) -> None:
    useless, notes = tiny.save(tiny.tiny_model("llama", seed=9, num_hidden_layers=num_layers), tmp_path), []
    tiny_tokenizer().save_pretrained(useless)
    chosen = chosen_settings(None, {**FLAGS, "target": str(chat_model), "draft": str(useless)})
    with open_session(chosen, offline=True, note=notes.append) as running:
        prompt = running.session.encode_raw("the cat")
        stats = [list(running.session.stream(prompt, running.sampling, max_tokens=60))[-1].stats for _ in range(3)]
    assert stats[0].draft_paused > 0
    assert (stats[0].drafted > 0) == (num_layers == 1)
    assert sum(each.draft_paused for each in stats) > 60
    assert notes == ["draft: switched off for the time being, since it costs more than it brings; it is tried again"]

    from app.cli import main

    options = ["--target", str(chat_model), "--draft", str(useless), "--dtype", "float32", "--ctx", "256"]
    assert main(["run", "the cat", "--raw", *options, "--max-tokens", "60", "--json"]) == 0
    out, err = capsys.readouterr()
    paused = json.loads(out.splitlines()[-1])["draft_paused"]
    assert paused > 0
    assert err.count("switched off") == 1
    assert f"draft paused for {paused} of " in err


def test_a_draft_that_is_a_copy_of_the_target_reads_its_rows(chat_model: Path, tmp_path: Path) -> None:
    plain, _, _ = answer(chat_model, [], draft="none", prompt="the cat " * 10)
    text, last, running = answer(chat_model, [], draft=str(chat_model), budget="16", prompt="the cat " * 10)
    assert text == plain and last.stats.tokens_per_pass > 2
    with pytest.raises(ValueError, match="rows read from another model"):
        running.session.drafter.lm.tap([0])


@pytest.mark.parametrize("resident", ["0", "1", "3", "4"])
def test_a_self_draft_is_the_target_where_that_stays(chat_model: Path, resident: str) -> None:
    plain, _, _ = answer(chat_model, [], draft="none")
    text, last, running = answer(chat_model, [], draft="self", resident=resident, budget="16")
    assert text == plain and last.stats.tokens_per_pass > 2
    layers = [lm.model.model.layers for lm in (running.session.target, running.session.drafter.lm)]
    shared = tuple(i for i, (theirs, mine) in enumerate(zip(*layers, strict=True)) if mine is theirs)
    assert shared == (running.plan.resident if resident != "4" else ())
    own = [sum(each.nbytes for each in layer.parameters()) for layer in layers[1]]
    assert dict(running.plan.items)["draft"] >= sum(nbytes for i, nbytes in enumerate(own) if i not in shared)
