"""EAGLE-3 against a reference of its own in every public layout; fed one index or position off, it is caught."""

import constructed
import numpy as np
import pytest
import torch
from eagles import LAYOUTS, Reference, stored, true_features
from oracles import random_tree
from tiny import VOCAB, tiny_model

from specexec.drafters.eagle3 import Eagle3Config, Eagle3Net, eagle3_drafter
from specexec.drafters.eagle3_layout import eagle3_layout
from specexec.drafters.layouts import TargetShape, fill, on_meta
from specexec.lm import CachedLM, as_ids, score_tree
from specexec.tree import empty_tree

TARGET = TargetShape(hidden_size=64, num_layers=6, vocab_size=VOCAB)


def loaded(config: dict, tensors: dict[str, torch.Tensor]) -> Eagle3Net:
    shape, sources = eagle3_layout(config, {name: tuple(each.shape) for name, each in tensors.items()}, TARGET)
    net = on_meta(Eagle3Net, shape)
    fill(net, sources, tensors.__getitem__, torch.float32)
    return net


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_the_reference_over_several_cycles(name: str) -> None:
    config, tensors, facts = stored(name)
    model = tiny_model("llama", num_hidden_layers=6)
    target = CachedLM(model, 100)
    head = eagle3_drafter(loaded(config, tensors), target).head
    reference = Reference(config, tensors, facts, model.model.embed_tokens.weight, model.lm_head.weight)
    context = as_ids(np.random.default_rng(2).integers(3, VOCAB, 7))
    score_tree(target, context, empty_tree())
    for cycle in range(3):  # a tree is grown, a part of it accepted, and so on
        context = as_ids([*context, 50 + cycle])
        score_tree(target, context[:-1], empty_tree())
        tree = random_tree(7, VOCAB, seed=cycle)
        expected = reference.scores(true_features(model, context, facts["ids"]), context, tree)
        found = [head.prefill(context), *constructed.grown(head, tree)]
        size = np.abs(expected[np.isfinite(expected)]).max()
        np.testing.assert_allclose(torch.cat(found).numpy(), expected, atol=1e-5 * max(size, 1), rtol=1e-5)
        score_tree(target, context, tree)
        context = as_ids([*context, tree.tokens[0]])


def test_a_long_context_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors, _ = stored("modelopt")
    context = as_ids(np.random.default_rng(2).integers(3, VOCAB, 30))
    found = []
    for chunk in (512, 7):
        monkeypatch.setattr("specexec.drafters.recurrent._CHUNK", chunk)
        target = CachedLM(tiny_model("llama", num_hidden_layers=6), 100)
        head = eagle3_drafter(loaded(config, tensors), target).head
        target.prefill(context[:-1])
        found.append(head.prefill(context))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def constructed_net(kind: str) -> Eagle3Net:
    """A head that guesses the constructed target's text from its features, the tokens, or the token one row before."""
    net = Eagle3Net(
        Eagle3Config(
            hidden_size=64,
            target_hidden_size=64,
            layer_ids=(0, 2, 3),
            vocab_size=constructed.VOCAB,
            draft_vocab_size=constructed.VOCAB,
            intermediate_size=64,
            num_heads=1,
            num_kv_heads=1,
            head_dim=64,
            norm_before_residual=kind != "features",
        )
    ).requires_grad_(False)
    tokens = np.arange(constructed.VOCAB)
    for parameter_name, parameter in net.named_parameters():
        parameter.fill_(1.0 if "norm" in parameter_name else 0.0)
    net.lm_head.weight[tokens, tokens] = 10
    layer, attention = net.layers[0], net.layers[0].self_attn
    following = constructed.NEXT
    if kind == "features":  # the middle layer's feature names LAYER^3 of its token; the MLP goes on from there
        net.fc.weight[following, 64 + constructed.power(constructed.LAYER, 3)] = 1
        constructed.replace_by_mlp(layer.mlp, following, height=8.0)
        return net
    attention.v_proj.weight[tokens, tokens] = 1
    if kind == "tokens":  # each row reads itself, by its content
        attention.q_proj.weight[tokens, tokens] = attention.k_proj.weight[tokens, tokens] = 4
        attention.o_proj.weight[:, :64] = 100 * constructed.one_hot_map(tokens, following)
    else:  # each row reads the one before it, by its position
        angles = attention.rope.frequencies
        attention.q_proj.weight[:32, constructed.CONSTANT] = 4
        attention.k_proj.weight[:32, constructed.CONSTANT] = 4 * angles.cos()
        attention.k_proj.weight[32:, constructed.CONSTANT] = 4 * angles.sin()
        attention.o_proj.weight[:, :64] = 100 * constructed.one_hot_map(tokens, constructed.power(following, 2))
    return net


@pytest.mark.parametrize("kind", ["features", "tokens", "positions"])
def test_a_head_that_is_right_is_accepted_fully(kind: str) -> None:
    target = CachedLM(constructed.constructed_target(), 80)
    assert constructed.accepted(eagle3_drafter(constructed_net(kind), target), target) == [6] * 5


@pytest.mark.parametrize("shift", ["layer", "feature row", "token", "position"])
def test_one_index_or_position_off_is_caught(shift: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = CachedLM(constructed.constructed_target(), 80)
    kind = {"token": "tokens", "position": "positions"}.get(shift, "features")
    net = constructed_net(kind)
    if shift == "layer":
        object.__setattr__(net.config, "layer_ids", (0, 1, 3))
    drafter = eagle3_drafter(net, target)
    constructed.shift(drafter.head, shift, monkeypatch)
    assert np.mean(constructed.accepted(drafter, target)) <= 1


def test_faults_are_named() -> None:
    config, tensors, _ = stored("safeailab")
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    faults = [
        (config, {**shapes, "midlayer.bias_1": (3,)}, "no place for: midlayer.bias_1"),
        (
            config,
            {name: shape for name, shape in shapes.items() if "mlp.up" not in name},
            "lacks tensors: layers.0.mlp",
        ),
        (config, {**shapes, "norm.weight": (65,)}, r"another shape .*: norm.weight \[65\]"),
        ({**config, "hidden_size": 128}, shapes, "another target: hidden size 128, this one's is 64"),
        ({**config, "vocab_size": 999}, shapes, "another target: vocabulary size 999, this one's is 320"),
        ({**config, "target_layer_ids": [1, 6, 7]}, shapes, r"reads layers \[6, 7\], this one has 6"),
        ({**config, "num_target_layers": 36}, shapes, "36 layers, this one has 6"),
        ({**config, "draft_vocab_size": 97}, shapes, "vocabulary of 97 tokens"),
        ({**config, "eagle_config": {"parallel_draft_step": 2}}, shapes, "several tokens in parallel"),
        ({**config, "hidden_act": "gelu"}, shapes, "'gelu'; only silu"),
        ({**config, "rope_scaling": {"rope_type": "spiral"}}, shapes, "unknown rope_scaling 'spiral'"),
        ({key: value for key, value in config.items() if key != "hidden_size"}, shapes, "lacks hidden_size"),
    ]
    for wrong_config, wrong_shapes, message in faults:
        with pytest.raises(ValueError, match=message):
            eagle3_layout(wrong_config, wrong_shapes, TARGET)
