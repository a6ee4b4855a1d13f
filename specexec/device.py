"""Where a model computes, which is not where each of its parameters rests."""

import torch
from transformers import PreTrainedModel


def compute_device(model: PreTrainedModel) -> torch.device:
    """The device of hidden states and logits: that of the head, for an embedding may be gathered in main memory."""
    return model.get_output_embeddings().weight.device
