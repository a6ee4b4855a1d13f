"""Whether a draft is a copy of the target in other weights: quantized, pruned or widened."""

import torch
from transformers import PreTrainedModel

from specexec.device import compute_device

_NEARNESS = 0.2  # of embeddings, relative: 4 bits err by a tenth, another model by more than one
_SAMPLE = 256
_SAME = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "rope_parameters",
    "vocab_size",
)


@torch.inference_mode()
def is_copy(model: PreTrainedModel, original: PreTrainedModel) -> bool:
    """Whether `original`'s KV rows can stand for those of `model`: same attention and, but for rounding, embeddings.

    It decides what a draft reads (`CachedLM.rows_of`), so that an error costs guesses, never a token.
    """
    mine, theirs = model.config.get_text_config(), original.config.get_text_config()
    if any(getattr(mine, name, None) != getattr(theirs, name, None) for name in _SAME):
        return False
    ids = torch.linspace(0, mine.vocab_size - 1, _SAMPLE).long()
    rows, others = (
        each.get_input_embeddings()(ids.to(compute_device(each))).float().cpu() for each in (model, original)
    )
    return bool((rows - others).norm() <= _NEARNESS * others.norm())
