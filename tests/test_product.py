"""Products with the weight first are those of torch's own linear layer, for every shape, type and bias."""

import pytest
import tiny
import torch
from torch.nn import functional as F

from offload.product import linear, put_weights_first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 0, 5), (3, 5), (1, 7, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equal_to_torch(dtype, shape, has_bias):
    torch.manual_seed(1)
    hidden, weight = torch.randn(shape, dtype=dtype), torch.randn(8, 5, dtype=dtype)
    bias = torch.randn(8, dtype=dtype) if has_bias else None
    expected = F.linear(hidden, weight, bias)
    found = linear(hidden, weight, bias)
    assert found.shape == expected.shape and found.dtype == dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gpt_oss"])
def test_a_model_gives_the_same_logits(family):
    model = tiny.tiny_model(family)
    ids = torch.arange(3, 33)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        put_weights_first(model)
        assert any("forward" in vars(module) for module in model.modules())
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
