"""Modules of learned drafts against the library's own, and with a batch in front as without."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specexec.drafters.layers import Attention, DecoderLayer, GatedMlp, RmsNorm, Rope

SCALINGS = {
    "default": {"rope_type": "default"},
    "images": {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
    "old spelling": {"type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_equals_the_library_s(name: str) -> None:
    scaling, positions, x = SCALINGS[name], torch.tensor([0, 5, 17, 40]), torch.randn(2, 4, 16)
    given = scaling if name != "images" else {"rope_type": "default"}
    config = LlamaConfig(
        hidden_size=16,
        num_attention_heads=1,
        max_position_embeddings=256,
        rope_parameters={**given, "rope_type": given.get("rope_type", "linear"), "rope_theta": 5e3},
    )
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected = apply_rotary_pos_emb(x[None], x[None], cos, sin)[0][0]
    rope = Rope(16, 5e3, scaling=scaling, max_positions=256)
    torch.testing.assert_close(rope(x, positions), expected, atol=1e-5, rtol=1e-5)


def test_a_part_of_the_head_may_be_left_alone() -> None:
    x, positions = torch.randn(2, 4, 16), torch.arange(4)
    turned = Rope(16, 1e4, rotary_factor=0.25)(x, positions)
    torch.testing.assert_close(turned[..., 4:], x[..., 4:], rtol=0, atol=0)
    torch.testing.assert_close(turned[..., :4], Rope(4, 1e4)(x[..., :4], positions))


def test_an_incomplete_scaling_is_named() -> None:
    with pytest.raises(ValueError, match="rope_scaling of type 'llama3' is incomplete: .*low_freq_factor"):
        Rope(16, 1e4, scaling={"rope_type": "llama3", "factor": 8.0})


def test_norms_compute_in_fp32_and_give_the_type_they_were_given() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16) * 100
    weight = torch.randn(8)
    for zero_centered in (False, True):
        norm = RmsNorm(8, 1e-6, zero_centered=zero_centered).requires_grad_(False)
        norm.weight.copy_(weight)
        plain = x.float() / x.float().pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
        expected = plain * (weight + 1 if zero_centered else weight)
        assert norm(x).dtype == torch.bfloat16
        torch.testing.assert_close(norm(x).float(), expected, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("gated", [False, True])
def test_a_batch_gives_what_its_members_give(gated: bool) -> None:
    torch.manual_seed(0)
    attention = Attention(32, 4, 2, 16, rope=Rope(16, 1e4), qk_norm=True, gated=gated)
    layer = DecoderLayer(attention, GatedMlp(32, 48), lambda: RmsNorm(32, 1e-6)).requires_grad_(False)
    x, positions = torch.randn(3, 5, 32), torch.arange(5)
    mask = positions <= positions[:, None]

    def keep(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert keys.shape[-3:] == values.shape[-3:] == (2, 5, 16)
        return keys, values, mask

    together = layer(x, positions, keep)
    torch.testing.assert_close(together, torch.stack([layer(each, positions, keep) for each in x]))
