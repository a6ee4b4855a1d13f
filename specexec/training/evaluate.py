"""How long a draft's accepted runs are on texts that it was not trained on, by the engine itself."""

from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedModel

from specexec.drafters import Drafter
from specexec.engine import generate
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams, make_sampler


def acceptance_length(
    model: PreTrainedModel,
    drafter_for: Callable[[CachedLM], Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    budget: int,
    stop: frozenset[int],
) -> float:
    """Tokens per target pass, greedily, averaged over `prompts` (passes over the prompts themselves count as well)."""
    lengths = []
    lm = CachedLM(model, max(len(prompt) for prompt in prompts) + max_tokens + budget)
    drafter = drafter_for(lm)
    for prompt in prompts:
        sampler = make_sampler(SamplingParams(), tuple(stop), len(prompt))
        steps = generate(lm, drafter, prompt, sampler, budget=budget, max_tokens=max_tokens, stop=stop)
        lengths.append(float(np.mean([len(step.tokens) for step in steps])))
    return float(np.mean(lengths))
