"""An answer is given up between two layers of any draft's passes, and the next answer is right all the same."""

import numpy as np
import pytest
from blocks import config_of, tensors_of
from test_exact_learned import drafter_of as learned_drafter
from tiny import tiny_model
from tiny_tokenizer import tiny_tokenizer

from app.cancel import Cancelled
from app.session import Session
from specexec.drafters.chain import ChainDrafter
from specexec.drafters.dflash_layout import block_drafter
from specexec.drafters.graft import GraftDrafter
from specexec.drafters.model import ModelDrafter
from specexec.drafters.ngram import NGramDrafter
from specexec.drafters.suffix import SuffixDrafter
from specexec.drafters.translate import TranslatedLM
from specexec.drafters.window import WindowedLM
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams

TOKENIZER = tiny_tokenizer()
SAMPLED = SamplingParams(temperature=0.8, seed=3)
PROMPT = [1, 40, 41, 42, 40, 41]
TOKENS = 10


def draft_lm():
    return CachedLM(tiny_model("llama", seed=1), 144, vocab_size=len(TOKENIZER))


def block(layout, head=None):
    return lambda target: block_drafter(config_of(layout, head), tensors_of(layout, head), target)


DRAFTERS = {
    "model": lambda target: ModelDrafter(draft_lm()),
    "self": lambda target: ModelDrafter(CachedLM(tiny_model("llama", seed=1), 144, rows_of=target)),
    "window": lambda target: ModelDrafter(WindowedLM(draft_lm(), 8)),
    "translated": lambda target: ModelDrafter(TranslatedLM(draft_lm(), np.arange(len(TOKENIZER)), lambda ids: ids)),
    "graft": lambda target: GraftDrafter(ModelDrafter(draft_lm()), SuffixDrafter()),
    "graft of a chain": lambda target: GraftDrafter(ChainDrafter(ModelDrafter(draft_lm())), SuffixDrafter()),
    "eagle3": lambda target: learned_drafter("eagle3 safeailab", target),
    "mtp": lambda target: learned_drafter("mtp glm two dense", target),
    "graft of mtp": lambda target: GraftDrafter(learned_drafter("mtp speculators", target), SuffixDrafter()),
    "dflash": block("z-lab"),
    "dspark": block("Model-Optimizer", "rnn"),
}


class Countdown:
    """Says that an answer is given up from the n-th time on that one of `layers` begins; counts those that ran."""

    def __init__(self, layers):
        self.left = self.num_run = 0
        for layer in layers:  # looked at before the session's own check, which stands behind it
            layer.register_forward_hook(self._run)
            layer.register_forward_pre_hook(self._begin, prepend=True)

    def start(self, count):
        self.left, self.num_run = count, 0

    def is_over(self):
        return self.left <= 0

    def _begin(self, *_):
        self.left -= 1

    def _run(self, *_):
        self.num_run += 1


def tokens_of(session, **options):
    return [
        token for chunk in session.stream(PROMPT, SAMPLED, max_tokens=TOKENS, **options) for token in chunk.step.tokens
    ]


def make_session(target, drafter):
    return Session(target, drafter, TOKENIZER, ctx=128, budget=16, stop_ids=frozenset())


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_proposal_is_left_before_any_layer(kind):
    target = CachedLM(tiny_model("llama"), 144, vocab_size=len(TOKENIZER))
    expected = tokens_of(make_session(target, None))
    drafter = DRAFTERS[kind](target)
    session = make_session(target, drafter)
    countdown, num_left = Countdown(drafter.layers), 0
    for count in range(1, 1000, 2):
        countdown.start(count)
        try:
            whole = tokens_of(session, is_cancelled=countdown.is_over)
        except Cancelled:
            assert countdown.num_run == count - 1, "the layer that was to be left has been computed"
            num_left += 1
            countdown.start(10_000)
            assert tokens_of(session) == expected
            target.clear()  # else the target knows the whole answer, and drafts that wait for it begin elsewhere
            continue
        assert whole == expected
        break
    assert num_left


def test_drafts_without_a_network_have_no_layers():
    assert not [*NGramDrafter().layers, *SuffixDrafter().layers, *GraftDrafter(NGramDrafter(), SuffixDrafter()).layers]


def test_every_layer_of_a_graft_is_named_once():
    lm = draft_lm()
    graft = GraftDrafter(ChainDrafter(ModelDrafter(lm)), SuffixDrafter())
    assert graft.layers == tuple(lm.model.model.layers)
