"""Messages to text: one BOS, whole characters, stop strings that never leak, exact counts and reasons."""

from types import SimpleNamespace

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from app.session import Session, stop_ids_of
from app.textstream import TextStream
from specexec.drafters.model import ModelDrafter
from specexec.drafters.ngram import NGramDrafter
from specexec.engine import generate
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams, make_sampler

TOKENIZER = tiny_tokenizer()
MODEL = tiny.tiny_model("llama")
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, repetition_penalty=1.1, seed=5)


def session(drafter=None, *, ctx=128, budget=16, stop_ids=frozenset()):
    target = CachedLM(MODEL, ctx + budget, vocab_size=len(TOKENIZER))
    return Session(target, drafter, TOKENIZER, ctx=ctx, budget=budget, stop_ids=stop_ids)


def model_drafter(rows=256):
    return ModelDrafter(CachedLM(MODEL, rows, vocab_size=len(TOKENIZER)))


def answer(opened, prompt=(1, 40, 41, 42), params=GREEDY, **options):
    chunks = list(opened.stream(list(prompt), params, **options))
    assert all(chunk.stats.finish_reason is None for chunk in chunks[:-1])
    return "".join(chunk.text for chunk in chunks), chunks[-1].stats


def decode(ids):
    return bytes(ids).decode(errors="replace")


@given(st.text(), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_streamed_text_is_the_text_decoded_at_once(text, stop):
    stream = TextStream(decode, stop)
    pieces = []
    for byte in text.encode():
        pieces.append(stream.push(byte))
        if stream.is_stopped:
            break
    pieces.append(stream.flush())
    whole = "".join(pieces)
    first = min((text.find(each) for each in stop if each in text), default=len(text))
    assert whole == text[:first] or any(text.startswith(whole + each) for each in stop)
    assert not any(each in whole for each in stop)


def test_half_a_character_waits_for_the_rest():
    stream = TextStream(decode)
    assert [stream.push(byte) for byte in "a😀".encode()] == ["a", "", "", "", "😀"]
    stream.push("é".encode()[0])
    assert stream.flush() == "\ufffd"


def test_a_stop_string_that_never_comes_is_given_back():
    stream = TextStream(decode, ["###"])
    assert [stream.push(byte) for byte in b"a##b"] == ["a", "", "", "##b"]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 30])
def test_max_tokens_is_exact_with_and_without_a_draft(max_tokens):
    for drafter in (None, NGramDrafter(), model_drafter()):
        _, stats = answer(session(drafter), max_tokens=max_tokens)
        assert (stats.tokens, stats.finish_reason) == (max_tokens, "length")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_same_seed_same_text_whatever_draft_and_budget(params):
    plain = answer(session(), params=params, max_tokens=40)
    for drafter in (NGramDrafter(), model_drafter()):
        for budget in (1, 16, 64):
            text, stats = answer(session(drafter, budget=budget), params=params, max_tokens=40)
            assert (text, stats.tokens) == (plain[0], plain[1].tokens)
    assert stats.passes < stats.tokens


def test_a_stop_string_ends_text_and_count_where_plain_decoding_would():
    text, _ = answer(session(), max_tokens=40)
    middle = text[len(text) // 2 : len(text) // 2 + 2]
    plain, plain_stats = answer(session(), max_tokens=40, stop=[middle])
    drafted, stats = answer(session(model_drafter()), max_tokens=40, stop=[middle, "never to come"])
    assert plain == drafted == text[: text.index(middle)]
    assert (stats.tokens, stats.finish_reason) == (plain_stats.tokens, "stop")


@pytest.mark.parametrize("max_tokens", [5, 6, 7, 12])
def test_end_of_text_is_counted_but_not_shown(max_tokens):
    ids = greedy_ids(12)
    last = ids.index(ids[5])
    for drafter in (None, model_drafter()):
        text, stats = answer(session(drafter, stop_ids=frozenset({ids[last]})), max_tokens=max_tokens)
        assert text == TOKENIZER.decode(ids[: min(last, max_tokens)], skip_special_tokens=True)
        reason = "stop" if max_tokens > last else "length"
        assert (stats.tokens, stats.finish_reason) == (min(last + 1, max_tokens), reason)


def greedy_ids(count):
    target = CachedLM(MODEL, 200, vocab_size=len(TOKENIZER))
    sampler = make_sampler(GREEDY, [], 4)
    steps = generate(target, None, [1, 40, 41, 42], sampler, budget=1, max_tokens=count)
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("length", [60, 63])
def test_near_the_limit_the_answer_fills_the_context_exactly(length):
    prompt = [1] + [40 + i % 50 for i in range(length - 1)]
    plain = answer(session(ctx=64, budget=64), prompt, max_tokens=100)
    text, stats = answer(session(model_drafter(), ctx=64, budget=64), prompt, max_tokens=100)
    assert (text, stats.tokens, stats.finish_reason) == (plain[0], 64 - length, "length")


@pytest.mark.parametrize("length", [64, 65])
def test_a_prompt_too_long_is_refused_with_numbers(length):
    with pytest.raises(ValueError, match=f"{length} tokens and the context holds 64.*--ctx"):
        answer(session(ctx=64), [40] * length)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty"):
        answer(session(), [])


def test_exactly_one_bos():
    messages = [{"role": "user", "content": "the cat"}]
    for ids in (session().encode_chat(messages), session().encode_raw("<bos>the cat")):
        assert ids.count(TOKENIZER.bos_token_id) == 1


def test_no_chat_template_is_said():
    bare = tiny_tokenizer()
    bare.chat_template = None
    opened = Session(CachedLM(MODEL, 32), None, bare, ctx=16, budget=4, stop_ids=frozenset())
    with pytest.raises(ValueError, match="no chat template.*--raw"):
        opened.encode_chat([{"role": "user", "content": "x"}])


def test_a_template_that_refuses_is_said_in_its_words():
    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('System role not supported') }}"
    opened = Session(CachedLM(MODEL, 32), None, strict, ctx=16, budget=4, stop_ids=frozenset())
    with pytest.raises(ValueError, match="System role not supported"):
        opened.encode_chat([{"role": "system", "content": "x"}])


def test_what_ends_a_text_is_the_union_of_all_sources():
    config, generation = SimpleNamespace(eos_token_id=[7, 9]), SimpleNamespace(eos_token_id=11)
    assert stop_ids_of(TOKENIZER, config, generation, None) == {2, 4, 7, 9, 11}
