"""EAGLE-3 (arXiv 2503.01840): a decoder layer or a few over the target's fused features, run on their own output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specexec.acceptance import Acceptance
from specexec.drafters.layers import Attention, DecoderLayer, GatedMlp, Keep, RmsNorm, Rope, rows_of_head
from specexec.drafters.recurrent import RecurrentDrafter, RecurrentHead
from specexec.lm import CachedLM


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of a head and which of the public variants it is.

    layer_ids: the target's layers whose outputs it reads, as CachedLM.tap counts them.
    vocab_size: of the target; draft_vocab_size: of its own head, smaller if it guesses only frequent tokens.
    fc_norm: each layer's features are normed before they are fused; norm_before_fc: all of them together.
    norm_embedding: the token's embedding is normed. norm_before_residual: the residual is the normed hidden state.
    norm_output: the next step reads the hidden state after the final norm, not the one before it.
    mapped: d2t says which tokens the draft's are. own_embedding, own_head: whether it has these itself; the target's
        are used where not.
    """

    hidden_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 1
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    max_positions: int = 2048
    bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_embedding: bool = True
    norm_before_residual: bool = False
    norm_output: bool = False
    final_norm: bool = True
    mapped: bool = False
    own_embedding: bool = False
    own_head: bool = True


class Eagle3Net(nn.Module):
    """The head as a step of RecurrentHead; token ids come in as embeddings, logits are left to the vocabulary head.

    Parameters: fc, fc_norm.{i}, input_norm, layers.0 with hidden_norm beside a decoder layer's usual names, further
    layers with these, norm, and where it has them embed_tokens, lm_head and d2t (int64 [draft_vocab_size]: what is
    added to a draft id to give the target's).
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, self.num_layers = config, config.num_layers
        num_features, target_hidden = len(config.layer_ids), config.target_hidden_size
        self.fc = nn.Linear(num_features * target_hidden, config.hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RmsNorm(target_hidden, config.eps) for _ in range(num_features))
        if config.norm_before_fc:
            self.input_norm = RmsNorm(num_features * target_hidden, config.eps)
        rope = Rope(config.head_dim, config.rope_theta, scaling=config.rope_scaling, max_positions=config.max_positions)
        self.layers = nn.ModuleList(
            [_FirstLayer(config, rope), *(_regular_layer(config, rope) for _ in range(1, config.num_layers))]
        )
        self.norm = RmsNorm(config.hidden_size, config.eps) if config.final_norm else nn.Identity()
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.mapped:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., n, H] from features [..., n, layers * target H], in the order of layer_ids."""
        if self.config.fc_norm:
            parts = features.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(self.input_norm(features) if self.config.norm_before_fc else features)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, keeps: Sequence[Keep]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next step reads and what the vocabulary head reads; see Step."""
        first, *others = self.layers
        hidden = first(embeds, hidden, positions, keeps[0])
        for layer, keep in zip(others, keeps[1:], strict=True):
            hidden = layer(hidden, positions, keep)
        output = self.norm(hidden)
        return (output if self.config.norm_output else hidden), output


def eagle3_drafter(net: Eagle3Net, target: CachedLM, *, acceptance: Acceptance | None = None) -> RecurrentDrafter:
    """A drafter for `target`, whose layers it listens to from now on; the net is on its device, in any dtype."""
    tap, dtype = target.tap(net.config.layer_ids), net.fc.weight.dtype
    embed = net.embed_tokens if net.config.own_embedding else target.model.get_input_embeddings()
    head = RecurrentHead(
        tap,
        [net],
        target.max_rows,
        fuse=lambda features: net.fuse(features.to(dtype)),
        embed=lambda tokens: embed(tokens).to(dtype),
        head=_VocabularyHead(net, target),
    )
    return RecurrentDrafter(head, acceptance=acceptance)


class _VocabularyHead:
    """Logits over the target's vocabulary; tokens that the draft's lacks are never guessed."""

    def __init__(self, net: Eagle3Net, target: CachedLM) -> None:
        self._num_ids, self._mapped = target.vocab_size, net.config.mapped
        self._ids = torch.arange(net.config.draft_vocab_size, device=target.device)
        if self._mapped:
            self._ids = self._ids + net.d2t
        is_used = self._ids < self._num_ids
        self._kept = None if is_used.all() else torch.nonzero(is_used)[:, 0]
        if net.config.own_head:
            self._project = net.lm_head
        elif self._mapped:
            self._project = rows_of_head(target.model, self._ids, net.fc.weight.dtype)
        else:
            head = target.model.get_output_embeddings()
            self._project = lambda hidden: head(hidden.to(target.model.dtype))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._project(hidden)
        if not self._mapped:
            return logits[:, : self._num_ids]
        scattered = logits.new_full((len(logits), self._num_ids), -torch.inf)
        if self._kept is None:
            scattered[:, self._ids] = logits
        else:
            scattered[:, self._ids[self._kept]] = logits[:, self._kept]
        return scattered


class _FirstLayer(nn.Module):
    """Attends over embedding and hidden state side by side, each normed."""

    def __init__(self, config: Eagle3Config, rope: Rope) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RmsNorm(config.hidden_size, config.eps)
        self.input_layernorm = RmsNorm(config.hidden_size, config.eps) if config.norm_embedding else nn.Identity()
        self.self_attn = _attention(config, rope, input_size=2 * config.hidden_size)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.eps)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, keep: Keep) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        kept = keep(*self.self_attn.keys_values(x, positions))
        hidden = (normed if self.norm_before_residual else hidden) + self.self_attn(x, positions, *kept)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def _regular_layer(config: Eagle3Config, rope: Rope) -> DecoderLayer:
    return DecoderLayer(
        _attention(config, rope, input_size=config.hidden_size),
        GatedMlp(config.hidden_size, config.intermediate_size, bias=config.mlp_bias),
        lambda: RmsNorm(config.hidden_size, config.eps),
    )


def _attention(config: Eagle3Config, rope: Rope, *, input_size: int) -> Attention:
    return Attention(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        rope=rope,
        input_size=input_size,
        bias=config.bias,
        output_bias=config.output_bias,
        qk_norm=config.qk_norm,
        eps=config.eps,
    )
