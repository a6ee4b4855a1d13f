"""Drafting with the target's own random numbers: its noise on a draft's scores makes both choose alike.

A target at temperature T takes the token with the largest logits / T + noise (see specexec.sampling). So a draft that
adds T x noise to its own logits drafts as for a greedy target: it is wrong where the two models' difference turns
their order, and nowhere else (Daliri et al. 2024, arXiv 2408.07978).
"""

import numpy as np
import torch

from specexec.budget import Budget


class Coupling:
    """Adds the noise of one proposal's tokens to a draft's logits; without noise they stay as they are.

    to_target: int64 [Vd], the target's id of each id that logits are given for; None where they are the same.
    """

    def __init__(self, budget: Budget, to_target: np.ndarray | None = None) -> None:
        self._budget, self._to_target = budget, to_target
        self._noise: dict[int, torch.Tensor] = {}  # by how far ahead, in units of logits

    def __call__(self, logits: torch.Tensor, ahead: np.ndarray) -> torch.Tensor:
        """Perturbed `logits` [n, Vd] of tokens that are drawn `ahead` (int64 [n]) tokens from now (0: the next)."""
        if self._budget.noise is None:
            return logits
        distances, places = np.unique(ahead, return_inverse=True)
        noise = torch.stack([self._of(distance, logits) for distance in distances.tolist()])
        return logits + (noise if len(noise) == 1 else noise[torch.from_numpy(places).to(noise.device)])

    def _of(self, ahead: int, logits: torch.Tensor) -> torch.Tensor:
        if ahead not in self._noise:
            if self._to_target is None:
                noise = self._budget.noise(ahead, logits.shape[-1])
            else:
                noise = self._budget.noise(ahead, int(self._to_target.max()) + 1)[self._to_target]
            self._noise[ahead] = torch.from_numpy(np.float32(self._budget.temperature * noise)).to(logits.device)
        return self._noise[ahead]
