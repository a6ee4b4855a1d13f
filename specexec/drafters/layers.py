"""Modules that learned drafts are made of; tensors are [..., n, size], so that a batch may lead or be absent."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Takes the keys and values of new rows; gives those of all rows that they may read, and the mask between them.
Keep = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


class RmsNorm(nn.Module):
    """x / rms(x) times the weight, or one plus the weight if `zero_centered`, computed in fp32."""

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centered else torch.ones(size))
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        weight = self.weight.float()
        return (normed * (1 + weight if self.zero_centered else weight)).to(x.dtype)


class Rope(nn.Module):
    """Rotary position embedding of the first `rotary_factor` of each head, halves rotated against each other.

    scaling: a config's rope_scaling or rope_parameters: its rope_type is any that transformers has; sections for images
        (mrope) make no difference to text. ValueError if it is incomplete or of an unknown type.
    max_positions: the context the draft is made for, which some kinds of scaling start from.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        *,
        scaling: Mapping[str, Any] | None = None,
        max_positions: int = 2048,
        rotary_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.size = int(head_dim * rotary_factor)
        with torch.device("cpu"):  # no checkpoint holds the frequencies, so a net on meta needs them all the same
            frequencies, self.factor = _frequencies(self.size, theta, dict(scaling or {}), max_positions)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [..., heads, n, head_dim] to `positions` (int64 [n], or [..., 1, n] where they differ)."""
        angles = positions[..., None].float() * self.frequencies.float()
        cos, sin = (part.mul(self.factor).to(x.dtype) for part in (angles.cos(), angles.sin()))
        turned, rest = x[..., : self.size], x[..., self.size :]
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention whose keys and values the caller keeps.

    input_size: of what is attended from and to, where it is not `hidden`.
    qk_norm: normalises each head's queries and keys over head_dim (`eps`, `zero_centered`: of those norms).
    gated: q_proj gives a gate behind each head's query; the output is multiplied by its sigmoid.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rope: Rope,
        input_size: int | None = None,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        eps: float = 1e-6,
        zero_centered: bool = False,
        gated: bool = False,
    ) -> None:
        super().__init__()
        size = input_size or hidden
        self.heads, self.kv_heads, self.head_dim, self.gated, self.rope = heads, kv_heads, head_dim, gated, rope
        self.q_proj = nn.Linear(size, heads * head_dim * (2 if gated else 1), bias=bias)
        self.k_proj = nn.Linear(size, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=output_bias)
        for name in ("q_norm", "k_norm"):
            norm = RmsNorm(head_dim, eps, zero_centered=zero_centered) if qk_norm else nn.Identity()
            self.add_module(name, norm)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated to `positions`, and values of x [..., n, size]: each [..., kv_heads, n, head_dim]."""
        keys, values = (proj(x).unflatten(-1, (self.kv_heads, -1)) for proj in (self.k_proj, self.v_proj))
        return self.rope(self.k_norm(keys).transpose(-3, -2), positions), values.transpose(-3, -2)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[..., n, hidden]: what x [..., n, size] reads from keys and values [..., kv_heads, rows, head_dim].

        mask: bool (True: visible) or additive, broadcast to [..., heads, n, rows]; None shows every row.
        """
        queries = self.q_proj(x).unflatten(-1, (self.heads, -1))
        if self.gated:
            queries, gate = queries.chunk(2, dim=-1)
        queries = self.rope(self.q_norm(queries).transpose(-3, -2), positions)
        shared = self.heads != self.kv_heads
        read = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=shared)
        read = read.transpose(-3, -2)
        if self.gated:
            read = read * gate.sigmoid()
        return self.o_proj(read.flatten(-2))


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A pre-norm transformer layer of `attention` and `mlp`, made with `norm` for both of its norms."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor, positions: torch.Tensor, keep: Keep) -> torch.Tensor:
        """x [..., n, hidden] after the layer; `keep` holds its keys and values."""
        normed = self.input_layernorm(x)
        kept = keep(*self.self_attn.keys_values(normed, positions))
        x = x + self.self_attn(normed, positions, *kept)
        return x + self.mlp(self.post_attention_layernorm(x))


def rows_of_head(
    model: PreTrainedModel, ids: torch.Tensor, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A target's head for a vocabulary that consists of `ids` (int64 [Vd]): hidden [..., n, H] -> logits [..., n, Vd].

    Rows of a plain matrix are copied, in `dtype`, which makes of the product a fraction; in fp32 the weight comes first
    in it, since that is faster on CPUs. A head of another kind, or one whose weights a hook brings, is called as it is.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head._forward_pre_hooks or not head.weight.is_floating_point():
        return lambda hidden: head(hidden.to(model.dtype))[..., ids]
    weight, bias = (None if part is None else part.detach()[ids].to(dtype) for part in (head.weight, head.bias))
    if dtype != torch.float32:
        return lambda hidden: F.linear(hidden.to(dtype), weight, bias)
    return lambda hidden: (weight @ hidden.to(dtype).mT).mT + (0 if bias is None else bias)


def _frequencies(size: int, theta: float, scaling: dict[str, Any], max_positions: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair, fp32 [size / 2], and what cosine and sine are multiplied by."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "mrope"):
        return theta ** -(torch.arange(0, size, 2).float() / size), 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"unknown rope_scaling {kind!r}; known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    own = {key: value for key, value in scaling.items() if key not in ("type", "partial_rotary_factor")}
    try:
        config = LlamaConfig(
            hidden_size=size,
            num_attention_heads=1,
            head_dim=size,
            max_position_embeddings=max_positions,
            rope_parameters={**own, "rope_type": kind, "rope_theta": theta},
        )
        return ROPE_INIT_FUNCTIONS[kind](config)
    except (KeyError, TypeError) as error:
        raise ValueError(f"rope_scaling of type {kind!r} is incomplete: {error}") from error
