"""Values too large for float16 are an error that names the layer, never text made of them."""

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from offload.hardware import is_recording


def refuse_overflow(model: PreTrainedModel, layers: torch.nn.ModuleList, stem: str, device: torch.device) -> None:
    """Has `model` raise FloatingPointError for the first layer whose output is not finite.

    Layers only leave a mark on the device; the marks are read once a pass, so that nothing waits in between. Those of a
    pass that is recorded as a CUDA graph are not, for it must not wait: only drafts are, whose guesses are no text.
    """
    is_finite = torch.ones(len(layers), dtype=torch.bool, device=device)

    def mark(i: int, _: torch.nn.Module, __: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        is_finite[i] = torch.isfinite(hidden).all()

    def check(*_: Any) -> None:
        if is_recording(device):
            return
        if not bool(is_finite.all()):
            name = f"{stem}{int(is_finite.int().argmin())}"
            is_finite.fill_(True)
            raise FloatingPointError(
                f"{name} computes values beyond the range of float16 (65504): use --dtype float32, or bfloat16 where"
                " the device has it"
            )

    for i, layer in enumerate(layers):
        layer.register_forward_hook(partial(mark, i))
    model.register_forward_hook(check)
