"""Drafts that are the target in other weights read its KV rows; all others keep to their own."""

import pytest
import tiny
import torch

from specexec.copies import is_copy


def rounded(model, levels):
    """The model with every matrix rounded to so many levels on either side of zero."""
    for weight in model.parameters():
        if weight.dim() > 1:
            step = weight.abs().amax(-1, keepdim=True) / levels
            weight.copy_((weight / step).round() * step)
    return model


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (lambda: rounded(tiny.tiny_model("qwen3"), 7), True),
        (lambda: tiny.tiny_model("qwen3", seed=1), False),  # the same shape, another model
        (lambda: tiny.tiny_model("qwen3", head_dim=16), False),
        (lambda: tiny.tiny_model("qwen3", num_hidden_layers=2), False),
        (lambda: tiny.tiny_model("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5e5}), False),
        (lambda: tiny.tiny_model("llama"), False),
    ],
    ids=["4 bits", "another", "other heads", "fewer layers", "other positions", "other family"],
)
def test_copies_are_recognised(draft, expected):
    assert is_copy(draft(), tiny.tiny_model("qwen3")) == expected


def test_a_pruned_copy_has_other_mlps_but_the_same_rows():
    original, pruned = tiny.tiny_model("llama"), tiny.tiny_model("llama", intermediate_size=32)
    pruned.model.embed_tokens.weight.copy_(original.model.embed_tokens.weight)
    assert is_copy(pruned, original)
    with torch.no_grad():
        pruned.model.embed_tokens.weight.mul_(1.5)
    assert not is_copy(pruned, original)
