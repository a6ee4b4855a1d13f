"""Every public layout is recognised; what does not fit, is not complete or is something else is refused by name."""

import re

import pytest
import torch
from blocks import BLOCK, DFLASH, DSPARK, HIDDEN, LAYERS, MASK, TARGET, config_of, tensors_of
from tiny import VOCAB, tiny_model

from specexec.drafters.dflash import BlockShape, DFlashDrafter
from specexec.drafters.dflash_layout import BlockLayout, block_drafter, block_layout, is_block_draft
from specexec.drafters.dspark import DSparkDrafter
from specexec.drafters.layouts import TargetShape
from specexec.lm import CachedLM

EVERY = [(layout, None) for layout in DFLASH] + [
    (layout, head) for layout in DSPARK for head in ("vanilla", "gated", "rnn")
]


def recognised(config: dict, tensors: dict[str, torch.Tensor], target: TargetShape = TARGET) -> BlockLayout:
    return block_layout(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, target)


def shape_of(**changes: object) -> BlockShape:
    """The shape of z-lab's draft after some changes to its config."""
    return recognised(config_of("z-lab") | changes, tensors_of("z-lab")).shape


@pytest.mark.parametrize(("layout", "head"), EVERY)
def test_every_layout_is_recognised(layout: str, head: str | None) -> None:
    config, tensors = config_of(layout, head), tensors_of(layout, head)
    assert is_block_draft(config, tensors)
    found = recognised(config, tensors)
    assert (found.name, found.rank > 0, found.confidence) == (layout, head is not None, "markov" if head else None)
    assert found.shape.target_layers == LAYERS and found.shape.mask_token == MASK
    assert found.shape.num_slots == (BLOCK if head or layout == "DeepSpec" else BLOCK - 1)
    assert found.shape.own_head == (layout == "DeepSpec")
    drafter = block_drafter(config, tensors, CachedLM(tiny_model("llama"), 40))
    assert type(drafter) is (DSparkDrafter if head else DFlashDrafter)


@pytest.mark.parametrize(("layout", "head"), EVERY)
def test_tensors_left_over_missing_and_of_another_shape_are_listed(layout: str, head: str | None) -> None:
    config, tensors = config_of(layout, head), tensors_of(layout, head)
    for name in tensors.keys() - {"embed_tokens.weight", "lm_head.weight"}:  # of which the target has its own
        word = name.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj")
        with pytest.raises(ValueError, match=re.sub("^(gate|joint)_proj", "mix.proj", word)):
            recognised(config, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ValueError, match=r"layers\.9\.mlp\.up_proj\.weight, sinks"):
        recognised(config, tensors | {"sinks": torch.zeros(1), "layers.9.mlp.up_proj.weight": torch.zeros(1)})
    name = "layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=rf"{name} \[3, 64\]"):
        recognised(config, tensors | {name: tensors[name][:3]})


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (TargetShape(2 * HIDDEN, 4, VOCAB), "hidden size"),
        (TargetShape(HIDDEN, 4, VOCAB + 1), "vocabulary"),
        (TargetShape(HIDDEN, 2, VOCAB), r"layers \[2\]"),
    ],
)
@pytest.mark.parametrize("layout", DFLASH)
def test_another_target_is_refused_with_what_differs(layout: str, target: TargetShape, says: str) -> None:
    with pytest.raises(ValueError, match=f"made for another target: .*{says}"):
        recognised(config_of(layout), tensors_of(layout), target)


def test_other_ways_to_differ() -> None:
    tensors = tensors_of("z-lab")
    with pytest.raises(ValueError, match="4 layers, this one has 6"):
        recognised(config_of("z-lab"), tensors, TargetShape(HIDDEN, 6, VOCAB))
    for key in ("mask_token_id", "target_layer_ids"):
        config = config_of("speculators")
        del config[{"target_layer_ids": "aux_hidden_state_layer_ids"}.get(key, key)]
        with pytest.raises(ValueError, match="lacks"):
            recognised(config, tensors_of("speculators"))
    with pytest.raises(ValueError, match="mask token 320"):
        recognised(config_of("DeepSpec") | {"mask_token_id": VOCAB}, tensors_of("DeepSpec"))
    with pytest.raises(ValueError, match="markov_head_type 'lstm'"):
        recognised(config_of("DeepSpec", "gated") | {"markov_head_type": "lstm"}, tensors_of("DeepSpec", "gated"))
    with pytest.raises(ValueError, match="rnn"):
        recognised(config_of("speculators", "rnn") | {"sample_from_anchor": False}, tensors_of("speculators", "rnn"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"conv_kernel_size": 2}, "DFlash2"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"dflash_config": {"projector_type": "other"}}, "'other'"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
    ],
)
def test_other_architectures_are_refused_by_name(changes: dict, says: str) -> None:
    config = config_of("z-lab") | changes
    assert is_block_draft(config, [])
    with pytest.raises(ValueError, match=says):
        recognised(config, tensors_of("z-lab"))


def test_a_vocabulary_of_its_own() -> None:
    config, tensors = config_of("speculators", num_ids=9), tensors_of("speculators", num_ids=9)
    target = CachedLM(tiny_model("llama"), 40)
    block_drafter(config, tensors, target)
    with pytest.raises(ValueError, match="different vocabularies"):
        block_drafter(config, tensors | {"t2d": tensors["t2d"].roll(1)}, target)
    with pytest.raises(ValueError, match="draft_vocab_size is 9"):
        recognised(config, {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")})
    whole = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    assert recognised(config_of("speculators"), tensors_of("speculators") | whole).shape.num_ids == VOCAB


def test_what_layers_see() -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    assert (shape_of().windows, shape_of().causal) == ((None, None), (False, False))
    assert (shape_of(**kinds).windows, shape_of(**kinds).causal) == ((8, None), (True, False))
    assert shape_of(**kinds, sliding_window_non_causal=True).causal == (False, False)
    assert shape_of(**kinds, causal=False).causal == (False, False)
    assert shape_of(**kinds, swa_window_size=6).windows == (6, None)
    assert shape_of(**kinds, use_swa=False).windows == (None, None)
    assert shape_of(is_causal=True).causal == (True, True)


def test_layers_that_the_config_leaves_open() -> None:
    config = config_of("z-lab") | {"num_target_layers": 36, "num_hidden_layers": 2}
    del config["dflash_config"]["target_layer_ids"]
    shape = recognised(config, tensors_of("z-lab"), TargetShape(HIDDEN, 36, VOCAB)).shape
    assert shape.target_layers == (1, 33)
