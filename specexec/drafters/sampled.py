"""The published baselines' drafts: guesses sampled from the draft model, as a chain or as a tree of fixed widths."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from specexec.budget import Budget
from specexec.drafters import DraftLM
from specexec.tree import ROOT, TokenTree


@dataclass(frozen=True)
class SampledTree(TokenTree):
    """A tree that remembers how it was drawn, which rejection sampling needs (see specexec.rejection).

    draws: per parent (the root first, then the nodes), its children in the order in which they were drawn; one that
        was drawn twice stands there twice.
    probs: float32 [1 + N, V], the draft's distribution behind each; rows of nodes without children are not used.
    """

    draws: tuple[tuple[int, ...], ...]
    probs: torch.Tensor


class SampledDrafter:
    """Samples `widths[0]` tokens behind the context, `widths[1]` behind each of them, and so on, independently.

    widths (1, 1, ...) is the chain of speculative decoding (arXiv 2211.17192), (4, 1, 1, 1) SpecInfer's four chains of
    four (arXiv 2305.09781). Under greedy decoding each is the draft's best token, then its next best.
    """

    def __init__(self, lm: DraftLM, widths: Sequence[int], *, seed: int = 0) -> None:
        self.lm = lm
        self._widths = tuple(widths)
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The draft model's; see Drafter."""
        return self.lm.layers

    def propose(self, context: np.ndarray, budget: Budget) -> SampledTree:
        """Guess what follows `context`; levels that do not fit into the budget are left out."""
        tokens, parents, draws, rows, probs = [], [], [], [], []
        level = [ROOT]
        logits = self.lm.prefill(context)
        room = min(budget.num_nodes, self.lm.num_free)
        for width in self._widths[: budget.max_depth]:
            drawn: dict[int, list[int]] = {}
            for parent, row in zip(level, self._distributions(logits, budget.temperature), strict=True):
                drawn[parent] = self._draw(row, width, budget.temperature)
                rows.append(parent + 1)
                probs.append(row)
            fresh = [(parent, token) for parent, found in drawn.items() for token in dict.fromkeys(found)]
            if len(tokens) + len(fresh) > room:
                break
            start = len(tokens)
            parents += [parent for parent, _ in fresh]
            tokens += [token for _, token in fresh]
            numbers = {place: start + offset for offset, place in enumerate(fresh)}
            draws += [(parent, tuple(numbers[parent, token] for token in found)) for parent, found in drawn.items()]
            level = list(range(start, len(tokens)))
            logits = self.lm.extend(np.array(tokens[start:]), np.array(parents[start:]))
        table = torch.zeros(len(tokens) + 1, self.lm.vocab_size)
        for row, distribution in zip(rows, probs, strict=True):
            table[row] = distribution
        children = dict(draws)
        return SampledTree(
            np.array(tokens, np.int64),
            np.array(parents, np.int64),
            np.zeros(len(tokens), np.float32),
            tuple(children.get(node, ()) for node in range(-1, len(tokens))),
            table,
        )

    def _distributions(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        return (logits.float() / (temperature or 1.0)).softmax(-1).cpu()

    def _draw(self, distribution: torch.Tensor, width: int, temperature: float) -> list[int]:
        if temperature == 0:
            return distribution.topk(width).indices.tolist()
        return torch.multinomial(distribution, width, replacement=True, generator=self._generator).tolist()
