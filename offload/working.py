"""Memory of computing, beside the weights: caches, logits, masks, activations; each in bytes by name."""

from collections.abc import Mapping

import torch

from offload.plan import EMBEDDING, kv_cache_bytes, logits_bytes
from offload.prefill import chunk_rows
from offload.shape import Shape

# Kernels' code, thread stacks and allocator slack that appear with the first pass, beside the matrix that oneDNN
# reorders: measured on models of 0.1 to 1.3 billion weights, with the context full. A target alone takes some 20 MB of
# it, one that drafts with its own copy 60.
_CPU_SCRATCH_BYTES = 96 << 20
_GPU_SCRATCH_BYTES = 256 << 20  # cuBLAS workspace, fragments of torch's allocator


def working_bytes(target: Shape, device: torch.device, *, ctx: int, budget: int) -> Mapping[str, int]:
    """What computing takes beside layers and slots, for a context of `ctx` tokens and trees of `budget` nodes."""
    text, item = target.text, target.dtype.itemsize
    rows, scored = ctx + budget, budget + 1
    kinds = len(set(getattr(text, "layer_types", None) or ["full_attention"]))
    scores = rows * rows * text.num_attention_heads * (2 * item + 4) if target.is_eager else 0
    return {
        EMBEDDING: target.embedding_bytes,
        "norm and head": sum(target.rest_bytes.values()) - target.embedding_bytes,
        "KV cache": kv_cache_bytes(target.config, rows, target.dtype),
        "logits": logits_bytes(target.config, scored, target.dtype),
        "tree mask": kinds * scored * rows * item,
        "activations": _activations_bytes(target, rows, chunk_rows(device)) + scores,
        "decoded matrix": target.decoded_bytes,
        "libraries' scratch": _CPU_SCRATCH_BYTES if device.type == "cpu" else _GPU_SCRATCH_BYTES,
    }


def draft_bytes(draft: Shape, *, rows: int, batch: int, is_copy: bool) -> Mapping[str, int]:
    """What a draft model takes, all of it resident, with `rows` of KV cache and `batch` nodes scored at once.

    is_copy: whether it is one of the target, whose embedding, norm and head it shares; its layers are counted with
    those of the target, some of which it shares too (`beside_copy`).
    """
    weights = sum(layer.resident_bytes for layer in draft.layers) + sum(draft.rest_bytes.values())
    return {
        **({} if is_copy else {"draft": weights}),
        "draft's decoded matrix": draft.decoded_bytes,
        "draft's KV cache": kv_cache_bytes(draft.config, rows, draft.dtype),
        "draft's logits": logits_bytes(draft.config, batch, torch.float32),
    }


def _activations_bytes(shape: Shape, rows: int, most_rows: int) -> int:
    """What lives at once at the widest place: hidden states of all rows, and an MLP's inner values of one chunk."""
    text = shape.text
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if shape.experts is not None:
        each = getattr(text, "moe_intermediate_size", None) or inner
        inner = max(inner, shape.experts[1] * (each + text.hidden_size))
    return (rows * 4 * text.hidden_size + min(rows, most_rows) * 3 * inner) * shape.dtype.itemsize
