"""Block drafts, DFlash and DSpark, learn at many anchors of a text in one pass (arXiv 2602.06036, 2607.05147)."""

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specexec.drafters import Drafter
from specexec.drafters.dflash import DFlashDrafter, DFlashNet
from specexec.drafters.dspark import DSparkDrafter, DSparkNet
from specexec.lm import CachedLM
from specexec.training.batches import Batch, TargetHead, frozen
from specexec.training.losses import agreement, confidence_loss, distance, guess_loss, in_parts, slot_weights


class BlockObjective(nn.Module):
    """A block is an anchor, whose token is the root, and mask tokens behind it; it sees the target's features of what
    stands before the anchor, and itself.

    anchors: the most per text. decay: slots after which a guess counts 1/e of the first one's. soft: see TrainRecipe.
    shares: of DSpark's loss: of guess_loss, of the distance to the target's distribution and of the confidence's.
    """

    def __init__(
        self,
        net: DFlashNet | DSparkNet,
        model: PreTrainedModel,
        head: TargetHead,
        *,
        anchors: int,
        decay: float,
        soft: float,
        shares: tuple[float, float, float] = (0.1, 0.9, 1.0),
    ) -> None:
        super().__init__()
        self.net = net
        self._embed, self._head = [model.get_input_embeddings()], head  # a list: the target's weights are not trained
        self._anchors, self._soft, self._shares = anchors, soft, shares
        self._weights = slot_weights(net.shape.num_slots, decay)

    @property
    def _backbone(self) -> DFlashNet:
        return self.net.backbone if isinstance(self.net, DSparkNet) else self.net

    def forward(self, batch: Batch) -> torch.Tensor:
        """[loss, weight, first guesses on which both agree, first guesses]: sums over the batch."""
        anchors = draw_anchors(batch, self._anchors)
        hidden = self._run(batch, anchors.clamp(min=0))
        slots = torch.arange(hidden.shape[2], device=hidden.device)
        guessed = anchors[:, :, None] + 1 + slots
        labels = self._head.places(batch.at(batch.ids, guessed))
        counted = batch.is_said(guessed) & (labels >= 0) & (anchors >= 0)[:, :, None]
        latent, confidence = self._corrections(batch.at(batch.ids, guessed - 1), hidden)
        rows = (
            hidden[counted],
            batch.at(batch.final, guessed - 1)[counted],
            labels[counted],
            self._weights.to(hidden.device).expand_as(labels)[counted],
            (slots == 0).expand_as(labels)[counted],
            latent[counted],
            confidence[counted],
        )
        return in_parts(self._compare, *rows)

    def _run(self, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, A, slots, hidden] of the blocks at `anchors` [B, A]."""
        net, shape = self._backbone, self._backbone.shape
        offsets = torch.arange(shape.block_size, device=anchors.device)
        ids = torch.full((*anchors.shape, shape.block_size), shape.mask_token, device=anchors.device)
        ids[:, :, 0] = batch.at(batch.ids, anchors)
        context = net.context(batch.features, torch.arange(batch.ids.shape[1], device=anchors.device))

        mask = sight(anchors, batch.ids.shape[1], shape.block_size)[:, None]
        keeps = [partial(_join, *each, mask) for each in context]
        positions = (anchors[:, :, None] + offsets).flatten(1)[:, None]
        hidden = net(net.embed(ids.flatten(1), self._embed[0]), positions, keeps)
        hidden = hidden.unflatten(1, (-1, shape.block_size))
        return hidden if shape.anchor_first else hidden[:, :, 1:]

    def _corrections(self, before: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per slot what the Markov head makes of the true token before it, and the acceptance's logit; nothing for
        DFlash. before: [B, A, slots]."""
        net = self.net
        if not isinstance(net, DSparkNet):
            return hidden[..., :0], hidden[..., 0]
        state, latents = hidden.new_zeros(*hidden.shape[:2], net.mix.state_size), []
        for slot in range(hidden.shape[2]):
            latent, state = net.mix(net.markov_w1(before[:, :, slot]), hidden[:, :, slot], state)
            latents.append(latent)
        return torch.stack(latents, dim=2), net.confidence(before, hidden)

    def _compare(
        self,
        hidden: torch.Tensor,
        final: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        first: torch.Tensor,
        latent: torch.Tensor,
        confidence: torch.Tensor,
    ) -> torch.Tensor:
        own = self._backbone.lm_head
        draft, target = self._head(hidden) if own is None else own(hidden).float(), self._head(final)
        if isinstance(self.net, DSparkNet):
            draft = draft + self.net.markov_w2(latent).float()
            gap = distance(draft, target)
            guess, near, sure = self._shares
            loss = guess * guess_loss(draft, target, labels, self._soft) + near * gap
            if self.net.confidence_proj is not None:
                loss = loss + sure * confidence_loss(confidence.float(), gap)
        else:
            loss = guess_loss(draft, target, labels, self._soft)
        agreed = agreement(draft, target)[first].sum()
        return torch.stack([(loss * weights).sum(), weights.sum(), agreed, first.float().sum()])

    def drafter(self, target: CachedLM) -> Drafter:
        """The net as it is now, drafting for `target`."""
        net = frozen(self.net, target)
        return DSparkDrafter(net, target) if isinstance(net, DSparkNet) else DFlashDrafter(net, target)


def draw_anchors(batch: Batch, most: int) -> torch.Tensor:
    """Places [B, A] of roots in the answers, in order, of up to `most` per text; -1 where a text has fewer.

    A root may be any token behind which the answer goes on, the prompt's last one too.
    """
    drawn = []
    for seed, start, length in zip(batch.seeds, batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        possible = np.arange(start - 1, length - 1)
        chosen = np.random.default_rng(seed).permutation(possible)[:most]
        drawn.append(torch.from_numpy(np.sort(chosen)))
    count = max(1, *(len(each) for each in drawn))
    return torch.stack([F.pad(each, (0, count - len(each)), value=-1) for each in drawn]).to(batch.ids.device)


def sight(anchors: torch.Tensor, num_tokens: int, block_size: int) -> torch.Tensor:
    """What the tokens of all blocks see of the text's tokens and then of all blocks': bool [B, A * S, T + A * S]."""
    places = torch.arange(num_tokens, device=anchors.device)
    block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block_size)
    context = places < anchors.repeat_interleave(block_size, dim=1)[:, :, None]
    own = (block[:, None] == block).expand(len(anchors), -1, -1)
    return torch.cat([context, own], dim=-1)


def _join(
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    mask: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.cat([context_keys, keys], dim=-2), torch.cat([context_values, values], dim=-2), mask
