"""Multi-token prediction: decoder layers that a target was trained with to guess further ahead (arXiv 2412.19437)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specexec.acceptance import Acceptance
from specexec.drafters.experts import Experts, ExpertsShape
from specexec.drafters.latent import LatentAttention, LatentShape
from specexec.drafters.layers import Attention, DecoderLayer, GatedMlp, Keep, RmsNorm, Rope
from specexec.drafters.recurrent import RecurrentDrafter, RecurrentHead
from specexec.lm import CachedLM


@dataclass(frozen=True)
class MtpConfig:
    """The shape of the layers and which family's they are.

    num_layers: the k-th guess after the root comes from layer k % num_layers.
    intermediate_size: of the MLP, where `experts` do not stand in its place.
    latent: the shape of latent attention, in place of heads with keys of their own.
    zero_centered: norms multiply by one plus their weight. gated: q_proj gives a gate for the output, too.
    recurrent_norm: the next step reads the hidden state after the layer's final norm, not the one before it.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    experts: ExpertsShape | None = None
    latent: LatentShape | None = None
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    rotary_factor: float = 1.0
    max_positions: int = 2048
    bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    zero_centered: bool = False
    recurrent_norm: bool = True


class MtpLayer(nn.Module):
    """One layer as a step of RecurrentHead: joins embedding and hidden state, in this order, before it attends."""

    num_layers = 1

    def __init__(self, config: MtpConfig, rope: Rope) -> None:
        super().__init__()
        hidden = config.hidden_size

        def norm() -> RmsNorm:
            return RmsNorm(hidden, config.eps, zero_centered=config.zero_centered)

        self.recurrent_norm = config.recurrent_norm
        self.embed_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        mlp = GatedMlp(hidden, config.intermediate_size) if config.experts is None else Experts(hidden, config.experts)
        self.block = DecoderLayer(_attention(config, rope), mlp, norm)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, keeps: Sequence[Keep]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next step reads and what the vocabulary head reads; see Step."""
        (keep,) = keeps
        joined = self.fc(torch.cat([self.embed_norm(embeds), self.hidden_norm(hidden)], dim=-1))
        hidden = self.block(joined, positions, keep)
        output = self.norm(hidden)
        return (output if self.recurrent_norm else hidden), output


class MtpNet(nn.Module):
    """All layers. Parameters: layers.{k}.{embed_norm, hidden_norm, fc, norm}, and layers.{k}.block of usual names."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        size = config.latent.rope_size if config.latent else config.head_dim
        rope = Rope(
            size,
            config.rope_theta,
            scaling=config.rope_scaling,
            max_positions=config.max_positions,
            rotary_factor=1.0 if config.latent else config.rotary_factor,
        )
        self.layers = nn.ModuleList(MtpLayer(config, rope) for _ in range(config.num_layers))


def mtp_drafter(net: MtpNet, target: CachedLM, *, acceptance: Acceptance | None = None) -> RecurrentDrafter:
    """A drafter for `target`, whose normed final hidden state it reads from now on; the net is on its device, in any
    dtype."""
    project, embed = target.model.get_output_embeddings(), target.model.get_input_embeddings()
    dtype = net.layers[0].fc.weight.dtype
    head = RecurrentHead(
        target.tap([], final_norm=True),
        list(net.layers),
        target.max_rows,
        fuse=lambda hidden: hidden.to(dtype),
        embed=lambda tokens: embed(tokens).to(dtype),
        head=lambda hidden: project(hidden.to(target.model.dtype))[:, : target.vocab_size],
    )
    return RecurrentDrafter(head, acceptance=acceptance)


def _attention(config: MtpConfig, rope: Rope) -> nn.Module:
    if config.latent is not None:
        return LatentAttention(config.hidden_size, config.latent, rope)
    return Attention(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        rope=rope,
        bias=config.bias,
        output_bias=config.output_bias,
        qk_norm=config.qk_norm,
        eps=config.eps,
        zero_centered=config.zero_centered,
        gated=config.gated,
    )
