"""Draft heads that go on from their own output: the target's features first, then what the head made of them.

Row r of a head's keys and values belongs to the pair of token r's hidden state and token r + 1, at position r. The rows
of the context come from the target's features and stay; those of a tree's nodes come from the head itself and are
dropped with the next context, whose features then replace them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from specexec.acceptance import Acceptance
from specexec.budget import Budget
from specexec.drafters.layers import Keep
from specexec.drafters.model import ModelDrafter
from specexec.features import FeatureTap
from specexec.tree import ROOT, TokenTree, ancestors, depths, empty_tree

_CHUNK = 512  # rows computed at once, so that the mask of a long prompt stays small


class Step(Protocol):
    """One step of a head: from pairs of a token's embedding and the hidden state before it to the next hidden state."""

    num_layers: int

    def __call__(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, keeps: Sequence[Keep]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden state that the next step reads and the one that the vocabulary head reads, each [..., n, H].

        embeds [..., n, E], hidden [..., n, H], positions int64 [n]; `keeps`: one for each of the step's layers.
        """
        ...


class RecurrentHead:
    """A head with CachedLM's face, so that ModelDrafter grows trees with it.

    steps: the k-th guess after the root comes from steps[k % len(steps)]. As in training, step s reads for every token
        what step s - 1 has made of the token before; with one step, what the head itself has made of it.
    fuse: the tap's features [n, width] -> hidden states [n, H] that the first step reads.
    embed: tokens int64 [n] -> [n, E]. head: [n, H] -> logits [n, V of the target].
    """

    def __init__(
        self,
        tap: FeatureTap,
        steps: Sequence[Step],
        max_rows: int,
        *,
        fuse: Callable[[torch.Tensor], torch.Tensor],
        embed: Callable[[torch.Tensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.max_rows = max_rows
        self._tap, self._steps, self._fuse, self._embed, self._head = tap, steps, fuse, embed, head
        self._hidden = [_Rows(max_rows) for _ in steps]
        self._keys_values = [[(_Rows(max_rows), _Rows(max_rows)) for _ in range(step.num_layers)] for step in steps]
        self._context = np.empty(0, np.int64)
        self._forget_nodes()

    @property
    def layers(self) -> tuple[Step, ...]:
        """The steps: each is a layer or a few."""
        return tuple(self._steps)

    @property
    def num_free(self) -> int:
        """Rows left behind the context and the nodes that were given last."""
        return self.max_rows - len(self._context) - len(self._parents)

    def is_ready(self, context: np.ndarray) -> bool:
        """Whether the target has computed the features of all of `context` before its root."""
        return self._tap.rows(context) is not None

    @torch.inference_mode()
    def prefill(self, context: np.ndarray) -> torch.Tensor:
        """Logits [1, V] of what follows `context`, which must be ready; only rows not yet held are computed."""
        features = self._tap.rows(context)
        assert features is not None, "the target has not computed the context yet"
        known = self._num_known(context)
        self._forget_nodes()
        self._context = context[: known + 1]
        tokens = torch.from_numpy(context).to(features.device)
        for stage in range(len(self._steps)):
            for start in range(max(known, stage), len(features), _CHUNK):
                rows = torch.arange(start, min(start + _CHUNK, len(features)), device=features.device)
                hidden = self._fuse(features[rows]) if stage == 0 else self._hidden[stage - 1][rows - 1]
                columns = torch.arange(int(rows[-1]) + 1, device=features.device)
                mask = (columns <= rows[:, None]) & (columns >= stage)
                output = self._run(stage, rows, self._embed(tokens[rows + 1]), hidden, positions=rows, mask=mask)
            if stage == 0:
                last = output[-1:]
        self._context = context
        return self._head(last)

    @torch.inference_mode()
    def extend(self, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        """Add nodes to the pending tree and score them: logits [n, V]. `parents` counts all pending nodes (or ROOT).

        Unlike a CachedLM's, parents must have been given in an earlier call: a node starts from what they ended in.
        """
        known, num_context = len(self._parents), len(self._context) - 1
        parents = np.concatenate([self._parents, parents])
        deep, seen = depths(parents, self._depths), ancestors(parents, self._seen)
        embeds = self._embed(self._to_device(tokens))
        outputs = torch.empty(0)
        for stage in range(len(self._steps)):
            active = self._has_row(stage, deep)
            now = np.flatnonzero(active[known:]) + known
            if not len(now):
                continue
            before = np.where(parents[now] == ROOT, num_context - 1, num_context + parents[now])
            mask = np.ones((len(now), num_context + len(parents)), bool)
            mask[:, :stage], mask[:, num_context:] = False, seen[now] & active
            output = self._run(
                stage,
                self._to_device(num_context + now),
                embeds[now - known],
                self._hidden[stage - 1][self._to_device(before)],
                positions=self._to_device(num_context - 1 + deep[now]),
                mask=self._to_device(mask),
            )
            if not len(outputs):
                outputs = output.new_empty(len(tokens), output.shape[-1])
            is_last = deep[now] % len(self._steps) == stage
            outputs[now[is_last] - known] = output[is_last]
        self._parents, self._depths, self._seen = parents, deep, seen
        return self._head(outputs)

    def _has_row(self, stage: int, deep: np.ndarray) -> np.ndarray:
        """Which nodes of depths `deep` the step computes: those it scores, and those that deeper ones read there."""
        num_steps = len(self._steps)
        return (deep <= stage) | ((deep >= num_steps) & (deep % num_steps == stage))

    def _run(
        self,
        stage: int,
        rows: torch.Tensor,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Compute `rows` of a step, which read the rows that `mask` [n, rows before and among them] shows."""
        keeps = [partial(_keep, kept, rows, mask) for kept in self._keys_values[stage]]
        following, output = self._steps[stage](embeds, hidden, positions, keeps)
        self._hidden[stage].put(rows, following)
        return output

    def _num_known(self, context: np.ndarray) -> int:
        """Rows at hand that hold for `context`; its last one is computed again, since its output is asked for."""
        shared = min(len(self._context), len(context))
        differing = np.flatnonzero(self._context[:shared] != context[:shared])
        shared = int(differing[0]) if len(differing) else shared
        return max(min(shared - 1, len(context) - 2), 0)

    def _forget_nodes(self) -> None:
        self._parents = self._depths = np.empty(0, np.int64)
        self._seen = np.empty((0, 0), bool)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._hidden[0].device)


class RecurrentDrafter:
    """Grows trees with a head, best first, and proposes nothing while the target still owes features."""

    def __init__(self, head: RecurrentHead, *, acceptance: Acceptance | None = None) -> None:
        self.head = head
        self._grower = ModelDrafter(head, acceptance=acceptance)

    @property
    def layers(self) -> tuple[Step, ...]:
        """The head's; see Drafter."""
        return self.head.layers

    @property
    def acceptance(self) -> Acceptance:
        """What the head's scores have turned out to be worth."""
        return self._grower.acceptance

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        return self._grower.propose(context, budget) if self.head.is_ready(context) else empty_tree()


class _Rows:
    """Rows [..., max_rows, size], made when the first ones come."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._data = torch.empty(0)

    @property
    def device(self) -> torch.device:
        return self._data.device

    def put(self, rows: torch.Tensor, new: torch.Tensor) -> None:
        if not self._data.numel():  # zeros: what a mask hides must still be finite
            self._data = new.new_zeros(*new.shape[:-2], self._max_rows, new.shape[-1])
        self._data[..., rows, :] = new

    def __getitem__(self, rows: torch.Tensor | slice) -> torch.Tensor:
        return self._data[..., rows, :]


def _keep(
    kept: tuple[_Rows, _Rows], rows: torch.Tensor, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    for part, new in zip(kept, (keys, values), strict=True):
        part.put(rows, new)
    return kept[0][: mask.shape[-1]], kept[1][: mask.shape[-1]], mask
