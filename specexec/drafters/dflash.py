"""DFlash: one pass over a block of mask tokens guesses several positions at once (arXiv 2602.06036)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from specexec.acceptance import Acceptance
from specexec.budget import Budget
from specexec.drafters.best_first import Proposal, Rows
from specexec.drafters.layers import Attention, DecoderLayer, GatedMlp, Keep, RmsNorm, Rope, rows_of_head
from specexec.lm import CachedLM
from specexec.tree import TokenTree, empty_tree


@dataclass(frozen=True)
class BlockShape:
    """What a block draft is made of and how its block is to be read.

    target_layers: whose outputs it reads, as CachedLM.tap counts them, each `target_hidden` wide.
    block_size: tokens of the block: the root and then mask tokens.
    anchor_first: the root's own place guesses the next token already: block_size guesses; else one fewer.
    windows, causal: per layer how many positions back it sees (None: all), and whether it sees no later place of the
        block. own_embedding, own_head: brings them along instead of using the target's.
    num_ids: ids that it gives logits for. If fewer than vocab_size, `d2t` leads from each to the target's.
    embedding_scale: of the bare embedding matrix; logit_scale, softcap: of what the head puts out.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    target_layers: tuple[int, ...]
    target_hidden: int
    block_size: int
    mask_token: int
    anchor_first: bool
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    vocab_size: int
    num_ids: int
    own_embedding: bool = False
    own_head: bool = False
    bias: bool = False
    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None
    rotary_factor: float = 1.0
    max_positions: int = 2048
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def num_slots(self) -> int:
        """How many tokens ahead one pass guesses."""
        return self.block_size if self.anchor_first else self.block_size - 1


class DFlashNet(nn.Module):
    """The backbone. Leading batch dimensions are allowed everywhere; keys and values are the caller's to keep."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        with torch.device("cpu"):  # its frequencies are not in any checkpoint: they must not be built on meta
            rope = Rope(
                shape.head_dim,
                shape.theta,
                scaling=shape.scaling,
                max_positions=shape.max_positions,
                rotary_factor=shape.rotary_factor,
            )
        self.fc = nn.Linear(len(shape.target_layers) * shape.target_hidden, shape.hidden, bias=False)
        self.hidden_norm = RmsNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList([_layer(shape, rope) for _ in shape.windows])
        self.norm = RmsNorm(shape.hidden, shape.eps)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden) if shape.own_embedding else None
        self.lm_head = nn.Linear(shape.hidden, shape.num_ids, bias=False) if shape.own_head else None
        if shape.num_ids < shape.vocab_size:
            self.register_buffer("d2t", torch.zeros(shape.num_ids, dtype=torch.int64))

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values [..., kv_heads, n, head_dim] of context tokens, from the target's features.

        features: [..., n, len(target_layers) * target_hidden]; positions: int64 [n].
        """
        fused = self.hidden_norm(self.fc(features))
        return [layer.self_attn.keys_values(fused, positions) for layer in self.layers]

    def forward(self, x: torch.Tensor, positions: torch.Tensor, keeps: Sequence[Keep]) -> torch.Tensor:
        """Normed hidden states [..., n, hidden] of embedded block tokens x at `positions` (int64, as Rope takes them).

        keeps: per layer, puts the context's keys and values in front of the block's and says what sees what (`sight`).
        """
        for layer, keep in zip(self.layers, keeps, strict=True):
            x = layer(x, positions, keep)
        return self.norm(x)

    def embed(self, ids: torch.Tensor, target: nn.Module) -> torch.Tensor:
        """Embeddings [..., n, hidden] of `ids`, by the draft's own matrix or the bare one of `target`'s module.

        Drafts are trained on the matrix itself: the factor that some families' modules multiply it by is taken back.
        """
        module = target if self.embed_tokens is None else self.embed_tokens
        factor = self.shape.embedding_scale / getattr(module, "scalar_embed_scale", 1.0)
        return (module(ids) * factor).to(self.fc.weight.dtype)

    def logits(
        self, hidden: torch.Tensor, target: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """fp32 logits [..., n, num_ids] by the draft's own head, or by the target's, which computes in `dtype`.

        target: the target's head for the draft's ids.
        """
        logits = target(hidden.to(dtype)) if self.lm_head is None else self.lm_head(hidden)
        logits = logits.float() * self.shape.logit_scale
        return logits if self.shape.softcap is None else self.shape.softcap * (logits / self.shape.softcap).tanh()

    def target_ids(self) -> torch.Tensor:
        """The target's id of each of the draft's: int64 [num_ids]."""
        ids = torch.arange(self.shape.num_ids, device=self.fc.weight.device)
        return ids + self.d2t if self.shape.num_ids < self.shape.vocab_size else ids


def _layer(shape: BlockShape, rope: Rope) -> DecoderLayer:
    """A layer as Qwen3 has it."""
    attention = Attention(
        shape.hidden,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        rope=rope,
        bias=shape.bias,
        output_bias=shape.bias,
        qk_norm=True,
        eps=shape.eps,
    )
    return DecoderLayer(attention, GatedMlp(shape.hidden, shape.inner), lambda: RmsNorm(shape.hidden, shape.eps))


def sight(queries: torch.Tensor, keys: torch.Tensor, window: int | None, causal: bool) -> torch.Tensor | None:
    """Which key positions (int64 [k]) a layer lets query positions (int64 [q]) see: bool [q, k], or None for all."""
    if window is None and not causal:
        return None
    distance = queries[:, None] - keys[None, :]
    shown = torch.ones_like(distance, dtype=torch.bool) if window is None else distance.abs() < window
    return shown & (distance >= 0) if causal else shown


class BlockPass:
    """Runs a backbone behind the target's committed tokens, whose keys and values it keeps as rows.

    net: on the target's device, in a dtype of its own; target: the model that it drafts for, of which it taps what it
    reads. to_target: int64 [num_ids], or None where the draft's ids are the target's.
    """

    def __init__(self, net: DFlashNet, target: CachedLM) -> None:
        self._net, self._target, shape = net, target, net.shape
        self._tap = target.tap(shape.target_layers)
        self._context = np.empty(0, np.int64)  # the tokens whose rows are filled
        size = (len(net.layers), 2, shape.kv_heads, target.max_rows + shape.block_size, shape.head_dim)
        self._rows = torch.zeros(size, dtype=net.fc.weight.dtype, device=target.device)
        self.to_target, self._head = None, target.model.get_output_embeddings()
        if shape.num_ids < shape.vocab_size:
            self.to_target = net.target_ids().cpu().numpy()
            self._head = rows_of_head(target.model, net.target_ids(), net.fc.weight.dtype)

    @torch.inference_mode()
    def hidden(self, context: np.ndarray) -> torch.Tensor | None:
        """Hidden states [num_slots, hidden] of the guesses behind `context`, or None while features are missing."""
        features = self._tap.rows(context)
        if features is None:
            return None
        shape, start = self._net.shape, len(context) - 1
        self._commit(context[:-1], features)
        ids = torch.full((shape.block_size,), shape.mask_token, device=self._target.device)
        ids[0] = int(context[-1])
        positions = torch.arange(start + shape.block_size, device=self._target.device)
        places = positions[start:]
        masks = [sight(places, positions, *kind) for kind in zip(shape.windows, shape.causal, strict=True)]
        keeps = [partial(self._keep, layer, mask) for layer, mask in zip(self._rows, masks, strict=True)]
        hidden = self._net(self._net.embed(ids, self._target.model.get_input_embeddings()), places, keeps)
        return hidden if shape.anchor_first else hidden[1:]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [n, ids] of hidden states [n, hidden]; ids that the target does not use are left out."""
        logits = self._net.logits(hidden, self._head, self._target.model.dtype)
        return logits if self.to_target is not None else logits[:, : self._target.vocab_size]

    def _commit(self, context: np.ndarray, features: torch.Tensor) -> None:
        """Fill the rows of those tokens of `context` that the rows do not hold yet."""
        shared = min(len(self._context), len(context))
        differing = np.flatnonzero(self._context[:shared] != context[:shared])
        kept = int(differing[0]) if len(differing) else shared
        self._context = context[:kept]  # an interrupt in between costs work, never correctness
        positions = torch.arange(kept, len(context), device=self._target.device)
        fresh = features[kept:].to(self._rows.dtype)
        for rows, (keys, values) in zip(self._rows, self._net.context(fresh, positions), strict=True):
            rows[0, :, kept : len(context)] = keys
            rows[1, :, kept : len(context)] = values
        self._context = context.copy()

    def _keep(
        self, rows: torch.Tensor, mask: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        start, end = len(self._context), len(self._context) + keys.shape[-2]
        rows[0, :, start:end] = keys
        rows[1, :, start:end] = values
        return rows[0, :, :end], rows[1, :, :end], mask


class DFlashDrafter:
    """Trees of the block's independent guesses: the most probable ones of their size under the product of the slots.

    One pass and no more, whatever the budget (DDTree, arXiv 2604.12989). What the scores are worth is learned for each
    slot by itself from every proposal's outcome: the further ahead, the less a guess knows of what stands before it.
    """

    def __init__(self, net: DFlashNet, target: CachedLM, *, acceptance: Acceptance | None = None) -> None:
        acceptance = acceptance or Acceptance()
        self.acceptances = [acceptance.slot(number) for number in range(net.shape.num_slots)]
        self._pass = BlockPass(net, target)
        self._proposed: Proposal | None = None
        self.layers = net.layers

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter. Nothing before the target has seen what stands before its end."""
        if self._proposed is not None:
            self._proposed.learn(context)
        self._proposed = None
        hidden = self._pass.hidden(context)
        if hidden is None:
            return empty_tree()
        depth = min(budget.max_depth, len(hidden))
        rows = Rows(self.acceptances, budget, self._pass.to_target)
        rows.add(self._pass.logits(hidden[:depth]), np.arange(depth))

        def below(row: int, rank: int) -> int | None:
            return row + 1 if row + 1 < depth else None

        best = rows.best(budget.num_nodes, below)
        self._proposed = Proposal(context, rows, best, below)
        return best.tree
