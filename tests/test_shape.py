"""Sizes from a config alone: as many weights as the authors say, and the same bytes as headers tell."""

import pytest
import shapes
import tiny
import torch

from offload.checkpoint import open_checkpoint
from offload.load import outline
from offload.shape import anatomy, shape_of, sketch


@pytest.mark.parametrize("name", shapes.EIGHT)
def test_number_of_weights_and_bytes(name):
    parts = anatomy(shapes.known_config(name))
    whole, eight, four = (sketch(parts, bits=bits) for bits in (16, 8, 4))
    assert whole.stored_bytes / 2e9 == pytest.approx(shapes.NUM_WEIGHTS[name], rel=0.01)
    layers = [sum(layer.slot_bytes for layer in each.layers) for each in (whole, eight, four)]
    assert layers[1] / layers[0] == pytest.approx(8 / 16, rel=0.005)
    assert layers[2] / layers[0] == pytest.approx(4.127 / 16, rel=0.005)
    assert whole.rest_bytes == four.rest_bytes  # embedding, norm and head stay as they are
    assert (whole.decoded_bytes, four.decoded_bytes > 0) == (0, True)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sketch_is_what_headers_tell(tmp_path, family, dtype):
    model = tiny.tiny_model(family)
    checkpoint = open_checkpoint(tiny.save(model, tmp_path))
    real = shape_of(outline(checkpoint, dtype=dtype), dtype)
    drawn = sketch(anatomy(model.config), dtype=dtype, stored=torch.float32)
    assert (real.num_weights, real.num_used, real.experts) == (drawn.num_weights, drawn.num_used, drawn.experts)
    assert len(real.layers) == len(drawn.layers)
    for ours, theirs in zip(drawn.layers, real.layers, strict=True):
        assert abs(ours.slot_bytes - theirs.slot_bytes) <= 3 * 4096  # files are read in whole blocks
    assert set(real.rest_bytes) == set(drawn.rest_bytes)


def test_experts_that_many_tokens_need():
    shape = sketch(anatomy(shapes.known_config("Qwen3 30B-A3B")))
    assert shape.experts == (128, 8)
    assert shape.distinct_experts(1) == pytest.approx(8)
    assert shape.distinct_experts(64) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 64))
    assert shape.distinct_experts(10_000) == pytest.approx(128)
    assert shape.num_used == pytest.approx(3.0e9, rel=0.1)
