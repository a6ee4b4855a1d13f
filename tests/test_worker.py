"""The queue: in order, bounded, left between two layers; what was given up changes nothing that follows."""

import queue
import threading

import pytest
import tiny
from tiny_tokenizer import tiny_tokenizer

from app.cancel import Cancelled
from app.session import Chunk, Session
from app.worker import QueueFull, Request, Stopped, Worker
from specexec.drafters.model import ModelDrafter
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams

TOKENIZER = tiny_tokenizer()
PROMPT = [1, 40, 41, 42, 43, 44]


class Gate:
    """Lets a layer through only while it is open; counts how often it was reached."""

    def __init__(self, layer):
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Semaphore(0)
        layer.register_forward_pre_hook(self._wait)

    def _wait(self, *_):
        self.reached.release()
        self._open.wait(20)

    def shut(self):
        self._open.clear()

    def open(self):
        self._open.set()


@pytest.fixture
def model():
    return tiny.tiny_model("llama")


def make_session(model, drafter=False):
    lm = CachedLM(model, 144, vocab_size=len(TOKENIZER))
    drafts = ModelDrafter(CachedLM(tiny.tiny_model("llama"), 144, vocab_size=len(TOKENIZER))) if drafter else None
    return Session(lm, drafts, TOKENIZER, ctx=128, budget=16, stop_ids=frozenset())


def collect(outcomes):
    """Text and the end of an answer: its stats, or the error."""
    text = ""
    while True:
        outcome = outcomes.get(timeout=20)
        if not isinstance(outcome, Chunk):
            return text, outcome
        text += outcome.text
        if outcome.stats.finish_reason:
            return text, outcome.stats


def order(prompt=PROMPT, max_tokens=20):
    return Request(prompt, SamplingParams(), max_tokens)


def submit(worker, request=None):
    outcomes = queue.SimpleQueue()
    return worker.submit(request or order(), outcomes.put), outcomes


@pytest.mark.parametrize("drafter", [False, True])
def test_a_pass_is_left_between_two_layers_and_the_next_answer_is_right(model, drafter):
    session = make_session(model, drafter)
    expected = "".join(chunk.text for chunk in session.stream(PROMPT, SamplingParams(), max_tokens=20))
    layers = model.model.layers
    for at in range(len(layers)):
        worker = Worker(session)
        gate, after = Gate(layers[at]), [] if at + 1 == len(layers) else [Gate(layers[at + 1])]
        gate.shut()
        ticket, outcomes = submit(worker, order([*PROMPT, 50 + at]))
        assert gate.reached.acquire(timeout=20)
        worker.cancel(ticket)
        gate.open()
        assert isinstance(collect(outcomes)[1], Cancelled)
        assert not any(each.reached.acquire(blocking=False) for each in after)
        _, outcomes = submit(worker)
        assert collect(outcomes)[0] == expected
        worker.close()


def test_places_count_down_and_a_cancelled_one_is_free_at_once(model):
    worker = Worker(make_session(model), max_waiting=2)
    gate = Gate(model.model.layers[0])
    gate.shut()
    first, _ = submit(worker)
    assert gate.reached.acquire(timeout=20)
    second, second_outcomes = submit(worker)
    third, third_outcomes = submit(worker)
    assert [worker.place(each) for each in (first, second, third)] == [0, 1, 2]
    with pytest.raises(QueueFull, match="2 requests wait"):
        submit(worker)
    worker.cancel(second)
    assert isinstance(collect(second_outcomes)[1], Cancelled)
    assert worker.place(third) == 1
    submit(worker)
    gate.open()
    assert collect(third_outcomes)[1].finish_reason == "length"
    worker.close()


def test_close_ends_all_with_an_error_and_joins(model):
    worker = Worker(make_session(model))
    gate = Gate(model.model.layers[0])
    gate.shut()
    pending = [submit(worker)[1] for _ in range(3)]
    assert gate.reached.acquire(timeout=20)
    worker.stop()
    gate.open()
    worker.close()
    assert all(isinstance(collect(outcomes)[1], Stopped) for outcomes in pending)
    with pytest.raises(Stopped):
        submit(worker)
    assert not [each for each in threading.enumerate() if each.name == "specexec-worker"]


def test_an_error_reaches_who_asked_and_the_worker_lives_on(model):
    worker = Worker(make_session(model))
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("disk gone")))
    assert str(collect(submit(worker)[1])[1]) == "disk gone"
    handle.remove()
    assert collect(submit(worker)[1])[1].tokens == 20
    with pytest.raises(ValueError, match="empty"):
        submit(worker, order([]))
    worker.close()


def test_turn_two_prefills_only_what_is_new(model):
    worker = Worker(make_session(model, drafter=True))
    outcomes = submit(worker, order(PROMPT * 8, 12))[1]
    tokens = []
    while len(tokens) < 12:
        tokens += outcomes.get(timeout=20).step.tokens
    new = [60, 61, 62]
    stats = collect(submit(worker, order(PROMPT * 8 + tokens + new, 3))[1])[1]
    assert stats.prompt_tokens - stats.cached_tokens <= len(new) + 1
    worker.close()
