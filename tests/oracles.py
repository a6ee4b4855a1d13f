"""The slow obvious versions that tests compare with, and drafters that are right or wrong by construction."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from specexec.budget import Budget
from specexec.sampling import SamplingParams, make_sampler
from specexec.tree import TokenTree, empty_tree

PENALISED = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    min_tokens=3,
    seed=5,
)


def plain_text(
    model: PreTrainedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    stop: frozenset[int] = frozenset(),
) -> list[int]:
    """Decoding as nobody would: the library's own forward over the whole text for every token, without a cache."""
    sampler = make_sampler(params, stop, len(prompt))
    text = list(prompt)
    for _ in range(max_tokens):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        text.append(sampler(logits, np.array(text)))
        if text[-1] in stop:
            break
    return text[len(prompt) :]


def noise(ahead: int, size: int) -> np.ndarray:
    """Another noise for each of the next tokens, as a sampler would hand it to drafts: see Budget."""
    return np.random.default_rng(ahead).gumbel(size=size)


def random_tree(num_nodes: int, vocab_size: int, seed: int = 0) -> TokenTree:
    """A tree of any shape: every node hangs from the root or from any earlier one, siblings carry different tokens."""
    rng = np.random.default_rng(seed)
    parents = np.array([rng.integers(-1, node) if node else -1 for node in range(num_nodes)])
    tokens = np.zeros(num_nodes, np.int64)
    for parent in range(-1, num_nodes):
        children = np.flatnonzero(parents == parent)
        tokens[children] = rng.choice(vocab_size, len(children), replace=False)
    return TokenTree(tokens, parents, -np.arange(num_nodes, dtype=np.float32))


def chain(tokens: Sequence[int]) -> TokenTree:
    """A tree of one branch."""
    count = len(tokens)
    return TokenTree(np.array(tokens, np.int64), np.arange(count) - 1, -np.arange(count, dtype=np.float32))


class AlwaysRight:
    """Knows the answer."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._text = [*prompt, *answer]

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        ahead = self._text[len(context) : len(context) + min(budget.num_nodes, budget.max_depth)]
        return chain(ahead) if ahead else empty_tree()


class AlwaysWrong(AlwaysRight):
    """Guesses everything but the answer."""

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        right = self._text[len(context)] if len(context) < len(self._text) else 0
        tokens = [token for token in range(budget.num_nodes + 1) if token != right][: budget.num_nodes]
        count = len(tokens)
        return TokenTree(np.array(tokens), np.full(count, -1), -np.arange(count, dtype=np.float32))
