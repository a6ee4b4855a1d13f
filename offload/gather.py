"""The input embedding in main memory: its rows are gathered there, and only they cross to the compute device."""

import torch
from transformers import PretrainedConfig, PreTrainedModel


def embedding_names(model: PreTrainedModel) -> frozenset[str]:
    """Names of the input embedding's parameters in `model`."""
    embedding = model.get_input_embeddings()
    stem = next(name for name, module in model.named_modules() if module is embedding)
    return frozenset(f"{stem}.{name}" for name, _ in embedding.named_parameters())


def is_tied(config: PretrainedConfig) -> bool:
    """Whether the head multiplies by the embedding's matrix, which then has to lie where the head computes."""
    return bool(getattr(config, "tie_word_embeddings", False))


def gather_on_host(embedding: torch.nn.Module, device: torch.device) -> None:
    """Has `embedding`, whose parameters are in main memory, take ids from anywhere and put its rows out on `device`.

    The matrix is not pinned: the CPU reads it, and what is copied to the device are the rows, in memory of their own.
    """
    embedding.to("cpu")  # its buffers too, such as the factor that gemma multiplies rows by

    def before(_: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (ids,) = args
        return (ids.to("cpu"),)

    def after(_: torch.nn.Module, __: tuple[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return rows.to(device)

    embedding.register_forward_pre_hook(before)
    embedding.register_forward_hook(after)
