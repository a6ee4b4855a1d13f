"""A draft with another vocabulary: common tokens cross over, the others are never guessed, the text stays the same."""

import numpy as np
import pytest
from oracles import plain_text
from tiny import VOCAB, tiny_model

from specexec.budget import Budget
from specexec.drafters.model import ModelDrafter
from specexec.drafters.translate import TranslatedLM, common_tokens
from specexec.engine import generate
from specexec.lm import CachedLM, as_ids
from specexec.sampling import SamplingParams, make_sampler

RNG = np.random.default_rng(0)
SHUFFLED = RNG.permutation(VOCAB)  # the draft's id of each target id
ONLY_OURS = set(range(100, 120))
TARGET = {f"Ġt{number}": number for number in range(VOCAB)}
DRAFT = {f"▁t{number}": int(SHUFFLED[number]) for number in range(VOCAB) if number not in ONLY_OURS}


def test_common_tokens() -> None:
    to_draft = common_tokens(TARGET, DRAFT, VOCAB)
    assert [number for number in range(VOCAB) if to_draft[number] < 0] == sorted(ONLY_OURS)
    assert all(to_draft[number] == SHUFFLED[number] for number in range(VOCAB) if number not in ONLY_OURS)
    with pytest.raises(ValueError, match="no token in common"):
        common_tokens(TARGET, {"x": 0}, VOCAB)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, seed=3)], ids=["greedy", "T"])
def test_the_text_is_the_target_s_and_guesses_are_right(params: SamplingParams) -> None:
    model, prompt = tiny_model("llama"), [5, 6, 7, 8, 9]
    draft = tiny_model("llama")  # the same function under other ids
    draft.model.embed_tokens.weight[SHUFFLED] = model.model.embed_tokens.weight.clone()
    draft.lm_head.weight[SHUFFLED] = model.lm_head.weight.clone()
    lm = TranslatedLM(CachedLM(draft, 300), common_tokens(TARGET, DRAFT, VOCAB), lambda context: SHUFFLED[context])
    drafter = ModelDrafter(lm)
    steps = list(generate(CachedLM(model, 200), drafter, prompt, make_sampler(params, (), 5), budget=16, max_tokens=24))
    text = [token for step in steps for token in step.tokens]
    assert text == plain_text(model, prompt, params, max_tokens=24)
    assert sum(step.accepted for step in steps) >= 8
    tree = drafter.propose(as_ids(prompt), Budget(64, 9))
    assert not ONLY_OURS & set(tree.tokens.tolist())
