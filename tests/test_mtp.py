"""MTP layers against the library's own decoder layers in every public layout; fed off by one, they are caught."""

import constructed
import numpy as np
import pytest
import torch
from mtps import LAYOUTS, Reference
from oracles import random_tree
from tiny import VOCAB, tiny_model

from specexec.drafters.layouts import TargetShape, fill, on_meta
from specexec.drafters.mtp import MtpConfig, MtpNet, mtp_drafter
from specexec.drafters.mtp_layout import mtp_layout, mtp_names
from specexec.lm import CachedLM, as_ids, score_tree
from specexec.tree import empty_tree

TARGET = TargetShape(hidden_size=64, num_layers=4, vocab_size=VOCAB)


def loaded(config: dict, tensors: dict[str, torch.Tensor]) -> MtpNet:
    shape, sources = mtp_layout(config, {name: tuple(each.shape) for name, each in tensors.items()}, TARGET)
    net = on_meta(MtpNet, shape)
    fill(net, sources, tensors.__getitem__, torch.float32)
    return net


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_the_reference_over_several_cycles(name: str) -> None:
    reference = Reference(name)
    model = tiny_model("llama")
    model.lm_head.weight.mul_(0.1)
    target = CachedLM(model, 100)
    head = mtp_drafter(loaded(*reference.stored()), target).head
    context = as_ids(np.random.default_rng(2).integers(3, VOCAB, 7))
    score_tree(target, context, empty_tree())
    for cycle in range(2):
        context = as_ids([*context, 50 + cycle])
        score_tree(target, context[:-1], empty_tree())
        tree = random_tree(7, VOCAB, seed=cycle)
        expected = reference.scores(model, context, tree)
        found = torch.cat([head.prefill(context), *constructed.grown(head, tree)])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
        score_tree(target, context, tree)
        context = as_ids([*context, tree.tokens[0]])


def test_experts_may_be_stored_together() -> None:
    config, tensors = Reference("qwen moe").stored()
    apart = loaded(config, tensors)
    together = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stem = "mtp.layers.0.mlp.experts."
    together[f"{stem}gate_up_proj"] = apart.layers[0].block.mlp.gate_up_proj
    together[f"{stem}down_proj"] = apart.layers[0].block.mlp.down_proj
    for key, tensor in loaded(config, together).state_dict().items():
        torch.testing.assert_close(tensor, apart.state_dict()[key], rtol=0, atol=0)


def constructed_net(kind: str) -> MtpNet:
    """A layer that guesses the constructed target's text from its features, the tokens, or the token one row before."""
    net = MtpNet(MtpConfig(64, 1, num_heads=1, num_kv_heads=1, head_dim=64, intermediate_size=64)).requires_grad_(False)
    for name, parameter in net.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    tokens, named = np.arange(constructed.VOCAB), constructed.power(constructed.LAYER, 4)  # how features name tokens
    layer, following = net.layers[0], constructed.NEXT
    if kind == "features":  # spoilt by the coordinate that the target's final norm takes away
        layer.fc.weight[named[following], 64 + named] = 1
        layer.fc.weight[0, 64 + constructed.CONSTANT] = 100
    elif kind == "tokens":
        layer.fc.weight[named, tokens] = 1
    else:  # each row reads the one before it, by its position
        attention = layer.block.self_attn
        layer.fc.weight[:, :64] = torch.eye(64)
        attention.q_proj.weight[:32, constructed.CONSTANT] = 4
        attention.k_proj.weight[:32, constructed.CONSTANT] = 4 * attention.rope.frequencies.cos()
        attention.k_proj.weight[32:, constructed.CONSTANT] = 4 * attention.rope.frequencies.sin()
        attention.v_proj.weight[tokens, tokens] = 1
        attention.o_proj.weight[:, :64] = 100 * constructed.one_hot_map(tokens, named[following])
    return net


@pytest.mark.parametrize("kind", ["features", "tokens", "positions"])
def test_a_layer_that_is_right_is_accepted_fully(kind: str) -> None:
    target = CachedLM(constructed.constructed_target(), 80)
    assert constructed.accepted(mtp_drafter(constructed_net(kind), target), target) == [6] * 5


@pytest.mark.parametrize("shift", ["before the norm", "feature row", "token", "position"])
def test_one_index_position_or_norm_off_is_caught(shift: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = CachedLM(constructed.constructed_target(), 80)
    net = constructed_net({"token": "tokens", "position": "positions"}.get(shift, "features"))
    drafter = mtp_drafter(net, target)
    if shift == "before the norm":
        drafter.head._tap = target.tap([3])
    constructed.shift(drafter.head, shift, monkeypatch)
    assert np.mean(constructed.accepted(drafter, target)) <= 1


def test_the_layers_are_found_among_a_checkpoint_s_tensors() -> None:
    names = ["model.layers.3.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"]
    mtp = [
        "model.layers.4.enorm.weight",
        "mtp.fc.weight",
        "mtp.layers.0.mlp.gate.weight",
        "mtp_layers.0.input_proj.weight",
    ]
    assert mtp_names([*names, *mtp], 4) == mtp


def test_faults_are_named() -> None:
    config, tensors = Reference("qwen moe").stored()
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    without = {name: shape for name, shape in shapes.items() if "experts.2.up" not in name}
    for wrong_config, wrong_shapes, message in (
        (config, {**shapes, "mtp.layers.0.extra": (3,)}, "no place for: mtp.layers.0.extra"),
        (config, {**shapes, "elsewhere": (3,)}, "no place for: elsewhere"),
        (config, {**shapes, "mtp.fc.weight": (64, 64)}, r"another shape .*: mtp.fc.weight \[64, 64\]"),
        (config, without, "another shape"),
        (config, {name: shapes[name] for name in shapes if "mtp.norm" not in name}, "lacks tensors: layers.0.norm"),
        ({**config, "hidden_size": 128}, shapes, "hidden size 128, this one's is 64"),
        ({**config, "vocab_size": 999}, shapes, "vocabulary size 999, this one's is 320"),
    ):
        with pytest.raises(ValueError, match=message):
            mtp_layout(wrong_config, wrong_shapes, TARGET)
