"""Configs of well-known models, written by hand: nothing is downloaded, and only sizes are computed."""

from transformers import AutoConfig, PretrainedConfig

_LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False}

_QWEN3 = {"vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128, "num_key_value_heads": 8}

_SHAPES = {
    "Llama 2 7B": (
        "llama",
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096},
    ),
    "Llama 2 13B": (
        "llama",
        {"vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40}
        | {"num_attention_heads": 40, "num_key_value_heads": 40, "max_position_embeddings": 4096},
    ),
    "Qwen3 32B": (
        "qwen3",
        {"vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
        | {"max_position_embeddings": 40960},
    ),
    "Llama 3 70B": (
        "llama",
        _LLAMA
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
        | {"num_attention_heads": 64, "num_key_value_heads": 8},
    ),
    "Qwen3 30B-A3B": (
        "qwen3_moe",
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
        | {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        | {"num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40960},
    ),
    "Mixtral 8x7B": (
        "mixtral",
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "gpt-oss 20B": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4}),
    "gpt-oss 120B": ("gpt_oss", {"num_hidden_layers": 36, "num_local_experts": 128, "num_experts_per_tok": 4}),
    "Llama 3 8B": (
        "llama",
        _LLAMA
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "Llama 2 70B": (
        "llama",
        {"vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 4096},
    ),
    "Qwen3 0.6B": (
        "qwen3",
        _QWEN3
        | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "tie_word_embeddings": True},
    ),
    "Qwen3 4B": (
        "qwen3",
        _QWEN3
        | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
        | {"num_attention_heads": 32, "tie_word_embeddings": True},
    ),
    "Qwen3 14B": (
        "qwen3",
        _QWEN3
        | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40}
        | {"num_attention_heads": 40, "tie_word_embeddings": False},
    ),
    "Qwen2.5 1.5B": (
        "qwen2",
        {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
        | {"num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768}
        | {"tie_word_embeddings": True},
    ),
    "Qwen2.5 72B": (
        "qwen2",
        {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768}
        | {"tie_word_embeddings": False},
    ),
    "Llama 3.2 1B": (
        "llama",
        _LLAMA
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
        | {"num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "SmolLM2 135M": (
        "llama",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
        | {"tie_word_embeddings": True},
    ),
}
ON_THE_HUB = {  # what presets name
    "HuggingFaceTB/SmolLM2-135M-Instruct": "SmolLM2 135M",
    "Qwen/Qwen3-0.6B": "Qwen3 0.6B",
    "Qwen/Qwen3-4B": "Qwen3 4B",
    "Qwen/Qwen3-14B": "Qwen3 14B",
    "Qwen/Qwen3-32B": "Qwen3 32B",
    "Qwen/Qwen3-30B-A3B": "Qwen3 30B-A3B",
    "Qwen/Qwen2.5-1.5B-Instruct": "Qwen2.5 1.5B",
    "Qwen/Qwen2.5-72B-Instruct": "Qwen2.5 72B",
    "meta-llama/Llama-3.2-1B-Instruct": "Llama 3.2 1B",
    "meta-llama/Llama-3.3-70B-Instruct": "Llama 3 70B",
}
EIGHT = tuple(_SHAPES)[:8]
NUM_WEIGHTS = {  # as their authors give them, in units of 10^9
    "Llama 2 7B": 6.74,
    "Llama 2 13B": 13.0,
    "Qwen3 32B": 32.8,
    "Llama 3 70B": 70.6,
    "Qwen3 30B-A3B": 30.5,
    "Mixtral 8x7B": 46.7,
    "gpt-oss 20B": 20.9,
    "gpt-oss 120B": 116.8,
}


def known_config(name: str) -> PretrainedConfig:
    """The config of one of the models above."""
    family, fields = _SHAPES[name]
    return AutoConfig.for_model(family, **fields)
