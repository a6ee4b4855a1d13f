"""Tiny random causal LMs of every supported family: same code paths as the real ones, milliseconds to run."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

torch.set_num_threads(1)  # matrices this small only lose by a second thread

VOCAB = 320
WINDOW = 8

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

# Each family keeps what sets it apart from llama: odd head sizes, windows, soft-caps, sinks, partial rotary, experts.
_OWN: dict[str, dict] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "mistral": {"sliding_window": WINDOW, "head_dim": 16},
    "gemma2": {"head_dim": 32, "sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 24},
    "gemma3_text": {"head_dim": 32, "sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 24},
    "phi3": {"tie_word_embeddings": False},
    "olmo2": {},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
    },
}
FAMILIES = tuple(_OWN)


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """A 4-layer config of `family`, one of FAMILIES; `changes` override single fields."""
    return AutoConfig.for_model(family, **{**_SHAPE, **_OWN[family], **changes})


def tiny_model(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """An fp32 model in eval mode whose random weights are large enough to keep logits well apart."""
    config = tiny_config(family, **changes)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention_of(config))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1 and "norm" in name:
            parameter.add_(noise, alpha=0.1)
        else:
            parameter.copy_(noise).mul_(0.2)
    return model.eval()


def attention_of(config: PretrainedConfig) -> str:
    """The attention whose sums are right for the family: soft-caps and sinks exist only in eager code."""
    return "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"


def save(model: PreTrainedModel, directory: Path, max_shard_size: str | int = "50GB") -> Path:
    """Writes config and safetensors; a small `max_shard_size` gives several shards and an index."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return Path(directory)
