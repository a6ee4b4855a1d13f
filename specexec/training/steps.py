"""EAGLE-3's training-time test: the head learns on its own output, as it drafts (arXiv 2503.01840); an MTP layer, too
(FastMTP, arXiv 2509.18362)."""

from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from specexec.drafters import Drafter
from specexec.drafters.eagle3 import Eagle3Net, eagle3_drafter
from specexec.drafters.mtp import MtpLayer, MtpNet, mtp_drafter
from specexec.lm import CachedLM
from specexec.training.batches import Batch, TargetHead, frozen
from specexec.training.losses import agreement, guess_loss, in_parts

Joined = list[tuple[torch.Tensor, torch.Tensor]]


class RecurrentObjective(nn.Module):
    """Row i pairs token i's features with token i + 1 and guesses token i + 2; step k of the test reads at row i what
    step k - 1 has made there, and token i + 1 + k. An MTP layer's features are what the target's head reads.

    As in drafting, a row of step k sees the rows of the first step up to its own, made of the target's features, and of
    the steps in between its own row only. steps: how many; decay: factor of the loss per step; soft: see TrainRecipe.
    """

    def __init__(
        self,
        net: Eagle3Net | MtpNet,
        model: PreTrainedModel,
        head: TargetHead,
        *,
        steps: int,
        decay: float,
        soft: float,
    ) -> None:
        super().__init__()
        self.net = net
        self._embed, self._head = [model.get_input_embeddings()], head  # a list: the target's weights are not trained
        self._steps, self._decay, self._soft = steps, decay, soft

    def forward(self, batch: Batch) -> torch.Tensor:
        """[loss, weight, rows of the first guess on which both agree, such rows]: sums over the batch."""
        net = self._step
        hidden = (batch.final if isinstance(net, MtpLayer) else net.fuse(batch.features))[:, :-1]
        rows = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        kept: list[Joined] = [[] for _ in range(net.num_layers)]
        sums = hidden.new_zeros(4, dtype=torch.float32)
        for step in range(self._steps):
            embeds = self._embed[0](batch.at(batch.ids, rows + 1 + step)).to(hidden.dtype)
            mask = sight(hidden.shape[1], step, hidden.device)
            keeps = [partial(_join, joined, mask) for joined in kept]
            hidden, output = net(embeds, hidden, rows[0] + step, keeps)
            sums = sums + self._compare(batch, output, rows + 2 + step, step)
        return sums

    @property
    def _step(self) -> Eagle3Net | MtpLayer:
        return self.net.layers[0] if isinstance(self.net, MtpNet) else self.net

    def _compare(self, batch: Batch, output: torch.Tensor, guessed: torch.Tensor, step: int) -> torch.Tensor:
        labels = self._head.places(batch.at(batch.ids, guessed))
        counted = batch.is_said(guessed) & (labels >= 0)
        final = batch.at(batch.final, guessed - 1)[counted]
        weight = self._decay**step

        def compute(output: torch.Tensor, final: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            draft, target = self._logits(output), self._head(final)
            loss = guess_loss(draft, target, labels, self._soft).sum() * weight
            agreed = agreement(draft, target).sum()
            count = loss.new_tensor(len(labels))
            return torch.stack([loss, count * weight, *((agreed, count) if step == 0 else (agreed * 0, count * 0))])

        return in_parts(compute, output[counted], final, labels[counted])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        own = getattr(self.net, "lm_head", None)
        return self._head(hidden) if own is None else own(hidden).float()

    def drafter(self, target: CachedLM) -> Drafter:
        """The net as it is now, drafting for `target`."""
        make = mtp_drafter if isinstance(self.net, MtpNet) else eagle3_drafter
        return make(frozen(self.net, target), target)


def sight(count: int, step: int, device: torch.device) -> torch.Tensor:
    """What `count` rows of a step see of the rows of all steps so far: bool [count, (step + 1) * count]."""
    own = torch.eye(count, dtype=torch.bool, device=device)
    return torch.cat([torch.ones_like(own).tril(), *[own] * step], dim=1)


def _join(
    joined: Joined, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    joined.append((keys, values))
    every_key, every_value = (torch.cat(each, dim=-2) for each in zip(*joined, strict=True))
    return every_key, every_value, mask
