"""A GGUF file as a checkpoint: its config, and its tensors under the names that transformers' checkpoints use."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from offload.entries import TensorEntry
from offload.ggml import Ggml, is_supported, plain_dtype

_ANY = {
    r"^token_embd\.": "model.embed_tokens.",
    r"^output_norm\.": "model.norm.",
    r"^output\.": "lm_head.",
    r"^blk\.": "model.layers.",
    r"\.attn_(q|k|v)\.": r".self_attn.\1_proj.",
    r"\.attn_output\.": ".self_attn.o_proj.",
    r"\.attn_(q|k)_norm\.": r".self_attn.\1_norm.",
    r"\.attn_norm\.": ".input_layernorm.",
}
_MLP = {r"\.ffn_(gate|up|down)\.": r".mlp.\1_proj.", r"\.ffn_norm\.": ".post_attention_layernorm."}
_EXPERTS = {
    r"\.ffn_gate_inp\.": ".mlp.gate.",
    r"\.ffn_(gate|up|down)_exps\.": r".mlp.experts.\1_proj.",
    r"\.ffn_gate_inp_shexp\.": ".mlp.shared_expert_gate.",
    r"\.ffn_(gate|up|down)_shexp\.": r".mlp.shared_expert.\1_proj.",
}
_FUSED = {r"\.attn_qkv\.": ".self_attn.qkv_proj.", r"\.ffn_up\.": ".mlp.gate_up_proj."}
_SANDWICH = {
    r"\.post_attention_norm\.": ".post_attention_layernorm.",
    r"\.ffn_norm\.": ".pre_feedforward_layernorm.",
    r"\.post_ffw_norm\.": ".post_feedforward_layernorm.",
}
_SIZES = {  # that transformers' reader leaves at a default
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\w+)\.weight")


@dataclass(frozen=True)
class _Family:
    """How llama.cpp's converter changes an architecture's tensors: their names, rotary rows, norms."""

    names: dict[str, str]
    has_paired_rows: bool = False
    norm_offset: float = 0.0


_FAMILIES = {
    "llama": _Family(_ANY | _MLP, has_paired_rows=True),
    "qwen2": _Family(_ANY | _MLP),
    "qwen3": _Family(_ANY | _MLP),
    "qwen2moe": _Family(_ANY | _EXPERTS | _MLP),
    "qwen3moe": _Family(_ANY | _EXPERTS | _MLP),
    "gemma2": _Family(_ANY | _MLP | _SANDWICH, norm_offset=1.0),
    "gemma3": _Family(_ANY | _MLP | _SANDWICH, norm_offset=1.0),
    "phi3": _Family(_ANY | _FUSED | _MLP),
}


def read_gguf(path: Path) -> tuple[PretrainedConfig, dict[str, TensorEntry]]:
    """Config and tensor index of a `.gguf` file, from its header; ValueError in one line for what cannot be read."""
    readers = {file: _reader(file) for file in _parts(path)}
    fields = readers[path].fields
    if "general.architecture" not in fields:
        raise ValueError(f"{path} does not say of which architecture it is; of a split model give the first file")
    architecture = str(fields["general.architecture"].contents())
    if architecture not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ValueError(f"{path} is of architecture {architecture!r}, which is not supported as GGUF (known: {known})")
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path}: transformers cannot read its {architecture!r} config: {reason}") from error
    for key, name in _SIZES.items():
        if (field := fields.get(f"{architecture}.{key}")) is not None and hasattr(config, name):
            setattr(config, name, int(field.contents()))
    tensors: dict[str, TensorEntry] = {}
    for file, reader in readers.items():
        for stored in reader.tensors:
            if stored.name == "rope_freqs.weight":
                _scale_rotary(path, config, stored.data)
            else:
                tensors |= {entry.name: entry for entry in _entries(file, stored, config, _FAMILIES[architecture])}
    config.tie_word_embeddings = "lm_head.weight" not in tensors
    return config, tensors


def _parts(path: Path) -> list[Path]:
    """The files of a model that is split into several, or the one file."""
    if (numbers := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)) is None:
        return [path]
    parts = [path.with_name(f"{numbers[1]}-{i:05}-of-{numbers[2]}.gguf") for i in range(1, int(numbers[2]) + 1)]
    for part in parts:
        if not part.is_file():
            raise FileNotFoundError(f"{path} belongs to a split model of which {part.name} is missing")
    return parts


def _reader(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a whole GGUF file: {error}; fetch it again") from error


def _entries(path: Path, stored: ReaderTensor, config: PretrainedConfig, family: _Family) -> list[TensorEntry]:
    """The tensor under its transformers name; experts that share one become an entry each."""
    kind, name = stored.tensor_type, stored.name
    if not is_supported(kind):
        raise ValueError(f"{path}: {name} is of type {kind.name}, which cannot be decoded here; take a Q4_K_M or Q8_0")
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    paired = next((count for part, count in heads.items() if part in name), 0) if family.has_paired_rows else 0
    encoding = Ggml(kind, paired, family.norm_offset if name.endswith("norm.weight") else 0.0)
    dtype = plain_dtype(kind)
    for pattern, replacement in family.names.items():
        name = re.sub(pattern, replacement, name)
    shape = tuple(int(size) for size in reversed(stored.shape))
    whole = TensorEntry(name, path, int(stored.data_offset), int(stored.n_bytes), dtype or torch.uint8, shape)
    if dtype is None or paired or encoding.offset:
        whole = replace(whole, dtype=torch.uint8, encoding=encoding)
    if whole.offset + whole.nbytes > path.stat().st_size:
        raise ValueError(f"{path} is cut short: {stored.name} ends at byte {whole.offset + whole.nbytes:,}")
    if (expert := _EXPERT.fullmatch(name)) is None:
        return [whole]
    each = whole.nbytes // shape[0]
    return [
        replace(
            whole,
            name=f"{expert[1]}.{i}.{expert[2]}.weight",
            offset=whole.offset + i * each,
            nbytes=each,
            shape=shape[1:],
        )
        for i in range(shape[0])
    ]


def _scale_rotary(path: Path, config: PretrainedConfig, divisors: np.ndarray) -> None:
    """Llama 3's rotary scaling, which these files hold as one divisor per frequency and transformers' reader drops."""
    theta = config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, 2 * len(divisors), 2).float() / (2 * len(divisors)))
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(scaled, plain / torch.from_numpy(divisors.copy()), rtol=1e-3):
        raise ValueError(f"{path} scales its rotary frequencies in a way that is not Llama 3's; use the safetensors")
