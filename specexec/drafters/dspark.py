"""DSpark: DFlash's backbone, and a head that lets each guess depend on the one before it (arXiv 2607.05147)."""

import time

import numpy as np
import torch
from torch import nn

from specexec.acceptance import Acceptance
from specexec.budget import Budget
from specexec.drafters.best_first import Best, Proposal, Rows
from specexec.drafters.dflash import BlockPass, BlockShape, DFlashNet
from specexec.lm import CachedLM
from specexec.tree import TokenTree, empty_tree

_LEARNING = 0.2


class PlainMix(nn.Module):
    """The previous token alone decides (head type "vanilla")."""

    state_size = 0

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What to correct by [..., rank] and the next state [..., state_size], from the previous token's embedding
        [..., rank], the slot's hidden states [..., hidden] and the state before it."""
        return embedded, state


class GatedMix(nn.Module):
    """The hidden state decides how much of the previous token counts (head type "gated")."""

    state_size = 0

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, rank)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As PlainMix.forward."""
        return self.proj(torch.cat([hidden, embedded], dim=-1)).sigmoid() * embedded, state


class RecurrentMix(nn.Module):
    """A state carries all guesses since the root (head type "rnn"); it starts from zeros."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.state_size = rank
        self.proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As PlainMix.forward."""
        gate, candidate, output = self.proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        kept = gate.sigmoid()
        return output.tanh(), kept * state + (1 - kept) * candidate.tanh()


class DSparkNet(nn.Module):
    """Backbone, Markov head of `rank` and, if `confidence`, a predictor of each guess's acceptance.

    mix: how the previous token becomes a correction of the logits.
    confidence: "hidden" reads the hidden state alone, "markov" the previous token's embedding too, None: there is none.
    """

    def __init__(self, shape: BlockShape, rank: int, mix: nn.Module, confidence: str | None) -> None:
        super().__init__()
        self.shape = shape
        self.backbone = DFlashNet(shape)
        self.mix = mix
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.num_ids, bias=False)
        size = {"hidden": shape.hidden, "markov": shape.hidden + rank, None: 0}[confidence]
        self.confidence_proj = nn.Linear(size, 1) if size else None

    def correct(
        self, tokens: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What to add to a slot's logits [..., num_ids] after `tokens` (int64 [...], the target's ids), and the state.

        hidden: [..., hidden] of the slot; state: [..., state_size] of the slot before it (zeros for the first).
        """
        latent, state = self.mix(self.markov_w1(tokens), hidden, state)
        return self.markov_w2(latent), state

    def confidence(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [...] of the probability that a slot's guess is accepted if those before it, ending in `tokens`, are.

        Without a predictor they are infinite: sure.
        """
        if self.confidence_proj is None:
            return torch.full_like(hidden[..., 0], torch.inf)
        parts = [hidden, self.markov_w1(tokens)]
        wide = self.confidence_proj.in_features > self.shape.hidden
        return self.confidence_proj(torch.cat(parts, dim=-1) if wide else hidden).squeeze(-1)


class DSparkDrafter:
    """Trees under the Markov head's conditional probabilities, grown best first; the backbone runs once a proposal.

    Each step corrects the logits behind the most probable nodes of the tree so far, whole vocabulary, until all that
    could have children in the tree have theirs: it is then the most probable one of its size. Nodes that the confidence
    head expects to be reached less often than `least_survival` get none. Where time matters (`budget.rate`), growth
    ends before the first step that costs more than it can bring, which is at most as many tokens as the nodes that it
    looks behind are likely to be accepted. What scores are worth is learned per slot, as by DFlashDrafter.
    """

    def __init__(
        self,
        net: DSparkNet,
        target: CachedLM,
        *,
        max_batch: int = 32,
        least_survival: float = 0.02,
        acceptance: Acceptance | None = None,
    ) -> None:
        acceptance = acceptance or Acceptance()
        self.acceptances = [acceptance.slot(number) for number in range(net.shape.num_slots)]
        self.max_batch, self.least_survival = max_batch, least_survival
        self._net, self._pass = net, BlockPass(net.backbone, target)
        self._proposed: Proposal | None = None
        self.layers = (*net.backbone.layers, net.mix)
        self._step_s = 0.0  # seconds of a step, fading

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter. Nothing before the target has seen what stands before its end."""
        if self._proposed is not None:
            self._proposed.learn(context)
        self._proposed = None
        hidden = self._pass.hidden(context)
        if hidden is None:
            return empty_tree()
        hidden = hidden[: budget.max_depth]
        rows = Rows(self.acceptances, budget, self._pass.to_target)
        growth = _Growth(self._net, rows, hidden, self._pass.logits(hidden))
        growth.start(int(context[-1]))
        best = self._grow(growth, budget)
        self._proposed = Proposal(context, rows, best, growth.below)
        return best.tree

    def _grow(self, growth: "_Growth", budget: Budget) -> Best:
        batch = max(self.max_batch, budget.num_nodes // 8)
        best = growth.best(budget.num_nodes)
        step = 0
        while nodes := growth.frontier(best, self.least_survival)[:batch]:
            hope = float(np.exp(best.tree.scores[nodes]).sum())
            if step and hope <= budget.rate * self._step_s:  # the first is always taken, or its time would never change
                break
            started = time.perf_counter()
            growth.expand([(best.rows[node], best.ranks[node]) for node in nodes])
            self._step_s += _LEARNING * (time.perf_counter() - started - self._step_s)
            best = growth.best(budget.num_nodes)
            step += 1
        return best


class _Growth:
    """The rows of one proposal with what the Markov head must know of each."""

    def __init__(self, net: DSparkNet, rows: Rows, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        self._net, self._rows, self._hidden, self._logits = net, rows, hidden, logits
        self._below: dict[tuple[int, int], int] = {}  # by row and rank of an expanded node: the row of its children
        self._states = hidden.new_zeros(1, net.mix.state_size)  # per row, behind the state before the root's
        self._survivals = np.ones(1)  # likewise: how probably a guess of the row, and all before it, are accepted

    def start(self, root: int) -> None:
        """Add the root's children."""
        self._step(np.array([root]), np.array([0]), np.array([0]))

    def expand(self, places: list[tuple[int, int]]) -> None:
        """Add the children of the nodes at `places` (row, rank)."""
        first = len(self._rows.slots)
        self._below.update({place: first + number for number, place in enumerate(places)})
        parents = np.array([row for row, _ in places])
        tokens = np.array([self._rows.tokens[row][rank] for row, rank in places])
        self._step(tokens, np.array(self._rows.slots)[parents] + 1, parents + 1)

    def best(self, num_nodes: int) -> Best:
        return self._rows.best(num_nodes, self.below)

    def below(self, row: int, rank: int) -> int | None:
        return self._below.get((row, rank))

    def frontier(self, best: Best, least_survival: float) -> list[int]:
        """The nodes of `best` that may get children and have none yet, best first."""
        return [
            node
            for node, place in enumerate(zip(best.rows, best.ranks, strict=True))
            if place not in self._below
            and self._rows.slots[place[0]] + 1 < len(self._hidden)
            and self._survivals[place[0] + 1] >= least_survival
        ]

    @torch.inference_mode()
    def _step(self, tokens: np.ndarray, slots: np.ndarray, before: np.ndarray) -> None:
        """Add the rows of `slots` after `tokens`, whose own rows' states and survivals stand at `before`."""
        device = self._hidden.device
        ids, places, earlier = (torch.from_numpy(each).to(device) for each in (tokens, slots, before))
        hidden = self._hidden[places]
        correction, states = self._net.correct(ids, hidden, self._states[earlier])
        width = self._logits.shape[-1]
        self._rows.add(self._logits[places] + correction[:, :width].float(), slots)
        sure = self._net.confidence(ids, hidden).float().sigmoid().cpu().numpy()
        self._states = torch.cat([self._states, states])
        self._survivals = np.concatenate([self._survivals, self._survivals[before] * sure])
