"""MLPs in chunks of rows give what they give in one piece, for every family."""

import pytest
import torch
from tiny import FAMILIES, VOCAB, tiny_model

from offload.load import decoder_layers
from offload.prefill import chunk_mlps


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_change_nothing(family):
    model = tiny_model(family)
    ids = torch.arange(3, 53)[None] % VOCAB
    seen = []
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        _, layers = decoder_layers(model)
        for layer in layers:
            layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
            inner = layer.mlp.forward
            layer.mlp.forward = lambda hidden, inner=inner: seen.append(hidden.shape[1]) or inner(hidden)
        chunk_mlps(layers, 16)
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert seen == [50, 13, 13, 12, 12] * len(layers)
