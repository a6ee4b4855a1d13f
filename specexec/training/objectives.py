"""From a recipe to what is trained: a new net for the target, inside the loss that teaches it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from specexec.drafters.dspark import DSparkNet
from specexec.drafters.mtp import MtpNet
from specexec.training.batches import Batch, TargetHead
from specexec.training.blocks import BlockObjective
from specexec.training.distill import DistillObjective
from specexec.training.nets import block_net, eagle3_net, mtp_net
from specexec.training.recipe import Recipe
from specexec.training.steps import RecurrentObjective

Objective = RecurrentObjective | BlockObjective | DistillObjective


def make_objective(
    recipe: Recipe,
    model: PreTrainedModel,
    vocabulary: np.ndarray | None,
    *,
    mask_token: int,
    student: PreTrainedModel | None = None,
) -> Objective:
    """A net with weights drawn by the recipe's seed, or `student` for "distill".

    vocabulary: the ids that a learned draft may guess, ascending; None for all. mask_token: see block_net.
    """
    torch.manual_seed(recipe.train.seed)
    train, draft, config = recipe.train, recipe.draft, model.config.get_text_config()
    head = TargetHead(model, vocabulary)
    if recipe.kind == "distill":
        return DistillObjective(student, head, soft=train.soft)
    if recipe.kind in ("eagle3", "mtp"):
        net = mtp_net(draft, config) if recipe.kind == "mtp" else eagle3_net(draft, config, vocabulary)
        objective = RecurrentObjective(net, model, head, steps=train.steps_ahead, decay=train.decay, soft=train.soft)
    else:
        net = block_net(recipe.kind, draft, config, vocabulary, mask_token=mask_token)
        objective = BlockObjective(net, model, head, anchors=train.anchors, decay=train.decay, soft=train.soft)
    backbone = _backbone(net)
    with torch.no_grad():
        if backbone.fc.weight.shape[0] == config.hidden_size:
            _start_from(backbone, model, head)
    return objective


def level(net: nn.Module, batches: Sequence[Batch]) -> None:
    """Scale the columns of the net's fc so that every feature starts with the same weight, whatever its size. An MTP
    layer norms what it reads itself."""
    if isinstance(net, MtpNet):
        return
    said = torch.cat([batch.features[batch.is_said(_places(batch))] for batch in batches])
    with torch.no_grad():
        _backbone(net).fc.weight /= said.square().mean(0).sqrt().clamp(min=1e-6)


def _backbone(net: nn.Module) -> nn.Module:
    """What has the fc that joins the features and the norm before the head."""
    return net.backbone if isinstance(net, DSparkNet) else net.layers[0] if isinstance(net, MtpNet) else net


def _places(batch: Batch) -> torch.Tensor:
    return torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)


def _start_from(net: nn.Module, model: PreTrainedModel, head: TargetHead) -> None:
    """The target's final norm, which its head is used to, made small enough that a net that knows nothing yet is not
    sure of anything; and the target's head where the net has one of its own."""
    norm = getattr(model.get_decoder(), "norm", None)
    if norm is not None and norm.weight.shape == net.norm.weight.shape:
        net.norm.weight.copy_(norm.weight)
    net.norm.weight /= (head.weight * net.norm.weight).norm(dim=1).mean()  # logits of unit variance
    if getattr(net, "lm_head", None) is not None:
        net.lm_head.weight.copy_(head.weight)
