"""DeepSeek's multi-head latent attention (arXiv 2405.04434), with keys and values kept as the heads read them."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from specexec.drafters.layers import RmsNorm, Rope

_EPS = 1e-6  # of the norms of what is compressed, whatever that of the layer's


@dataclass(frozen=True)
class LatentShape:
    """Sizes of latent attention: of the compressed queries (0: not compressed), keys and values, and of each head.

    interleaved: rotated pairs are neighbours, not halves of the head. scale: of the scores.
    """

    num_heads: int
    query_rank: int
    kv_rank: int
    plain_size: int
    rope_size: int
    value_size: int
    interleaved: bool
    scale: float
    bias: bool = False


class LatentAttention(nn.Module):
    """As Attention: keys_values for rows that are to be kept, forward for what reads them."""

    def __init__(self, hidden: int, shape: LatentShape, rope: Rope) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        head_size, queries = shape.plain_size + shape.rope_size, shape.num_heads * (shape.plain_size + shape.rope_size)
        if shape.query_rank:
            self.q_a_proj = nn.Linear(hidden, shape.query_rank, bias=shape.bias)
            self.q_a_layernorm = RmsNorm(shape.query_rank, _EPS)
            self.q_b_proj = nn.Linear(shape.query_rank, queries, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, shape.kv_rank + shape.rope_size, bias=shape.bias)
        self.kv_a_layernorm = RmsNorm(shape.kv_rank, _EPS)
        expanded = shape.num_heads * (head_size - shape.rope_size + shape.value_size)
        self.kv_b_proj = nn.Linear(shape.kv_rank, expanded, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.value_size, hidden, bias=shape.bias)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [..., heads, n, plain + rope] and values [..., heads, n, value_size] of x [..., n, hidden]."""
        shape = self.shape
        latent, turning = self.kv_a_proj_with_mqa(x).split([shape.kv_rank, shape.rope_size], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (shape.num_heads, -1)).transpose(-3, -2)
        plain, values = expanded.split([shape.plain_size, shape.value_size], dim=-1)
        turned = self._rotate(turning[..., None, :, :], positions)  # one for all heads
        return torch.cat([plain, turned.expand(*plain.shape[:-1], -1)], dim=-1), values

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[..., n, hidden]: what x reads from `keys` and `values`, of which `mask` shows some."""
        shape = self.shape
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if shape.query_rank else self.q_proj(x)
        queries = queries.unflatten(-1, (shape.num_heads, -1)).transpose(-3, -2)
        plain, turning = queries.split([shape.plain_size, shape.rope_size], dim=-1)
        queries = torch.cat([plain, self._rotate(turning, positions)], dim=-1)
        read = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=shape.scale)
        return self.o_proj(read.transpose(-3, -2).flatten(-2))

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.shape.interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return self.rope(x, positions)
