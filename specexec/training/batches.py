"""Texts of unequal length side by side, with what the target's layers say of them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specexec.device import compute_device
from specexec.lm import CachedLM
from specexec.training.answers import listening
from specexec.training.corpus import Text


@dataclass(frozen=True)
class Batch:
    """B texts of up to T tokens, filled up with zeros behind.

    numbers: of the texts. seeds: one for each text and the time it is seen, for what is drawn at random. ids: [B, T];
    lengths, starts (of the answers): [B]; features: [B, T, layers * H]; final: [B, T, H], what the head reads.
    """

    numbers: tuple[int, ...]
    seeds: tuple[int, ...]
    ids: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor

    def is_said(self, places: torch.Tensor) -> torch.Tensor:
        """Whether the tokens at `places` [B, ...] are of the answers."""
        starts, lengths = (each.view(-1, *[1] * (places.dim() - 1)) for each in (self.starts, self.lengths))
        return (starts <= places) & (places < lengths)

    def at(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """values [B, T, ...] at `places` [B, ...]; beyond the texts' ends the last ones."""
        flat = places.clamp(0, self.ids.shape[1] - 1).flatten(1)
        rows = torch.arange(len(flat), device=flat.device)[:, None]
        return values[rows, flat].unflatten(1, places.shape[1:])


def collate(texts: Sequence[Text], seeds: Sequence[int], *, model: PreTrainedModel, layers: Sequence[int]) -> Batch:
    """A batch on the model's device; features that the texts do not bring are computed by the model."""
    device = compute_device(model)
    length = max(len(text.ids) for text in texts)
    ids = torch.stack([F.pad(torch.from_numpy(text.ids), (0, length - len(text.ids))) for text in texts]).to(device)
    if texts[0].features is None:
        features, final = _computed(model, ids, layers)
    else:
        features, final = (
            torch.stack([F.pad(part, (0, 0, 0, length - len(part))) for part in parts]).to(device)
            for parts in ([text.features for text in texts], [text.final for text in texts])
        )
    return Batch(
        tuple(text.number for text in texts),
        tuple(seeds),
        ids,
        torch.tensor([len(text.ids) for text in texts], device=device),
        torch.tensor([text.start for text in texts], device=device),
        features.float(),
        final.float(),
    )


@torch.no_grad()
def _computed(model: PreTrainedModel, ids: torch.Tensor, layers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands behind a text's end is seen by nothing before it, so that no mask is needed."""
    with listening(model, layers) as heard:
        model.get_decoder()(input_ids=ids, use_cache=False)
    *features, final = [each[0] for each in heard]
    return torch.cat(features, dim=-1) if features else final[..., :0], final


class TargetHead:
    """The target's own head, or those rows of it that belong to a draft's vocabulary.

    ids: int64 [Vd], ascending; None for all. Raises ValueError for a head that is not a plain matrix.
    """

    def __init__(self, model: PreTrainedModel, ids: np.ndarray | None) -> None:
        head, config = model.get_output_embeddings(), model.config.get_text_config()
        if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
            raise ValueError("a draft can be trained only for a target whose head is not quantized")
        chosen = slice(None) if ids is None else torch.from_numpy(ids).to(head.weight.device)
        self.weight = head.weight.detach()[chosen].float()
        self.bias = None if head.bias is None else head.bias.detach()[chosen].float()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        size = config.vocab_size
        places = torch.arange(size) if ids is None else torch.full((size,), -1)
        if ids is not None:
            places[torch.from_numpy(ids)] = torch.arange(len(ids))
        self._places = places.to(head.weight.device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [..., Vd] of hidden states as the head reads them."""
        logits = F.linear(hidden.float(), self.weight, self.bias).float()
        return self.capped(logits if self.scale == 1 else logits * self.scale)

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def places(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where tokens stand in the draft's vocabulary, -1 where they do not."""
        return self._places[tokens]


def frozen(net: nn.Module, target: CachedLM) -> Any:
    """A copy of `net` as it is, in the target's dtype: what a run would load from where it is published."""
    net = copy.deepcopy(net).to(target.device).requires_grad_(False).eval()
    for parameter in net.parameters():  # buffers stay exact, as the frequencies of rotary embeddings must
        parameter.data = parameter.data.to(target.model.dtype)
    return net
