"""GGUF files of tiny random models, as llama.cpp's converter writes them: names, paired rotary rows, norms plus one."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3"}
_ARCHITECTURES |= {"phi3": "phi3", "qwen3_moe": "qwen3moe"}
_SCALES_AT = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray:
    """Valid blocks of a type that the `gguf` package cannot quantize to: any bits, with small finite scales."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (int(np.prod(shape)) // values, num_bytes), dtype=np.uint8)
    for at in _SCALES_AT[kind]:
        scales = generator.uniform(1e-4, 2e-3, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], shape[-1] // values * num_bytes)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: Kind,
    extra: dict[str, np.ndarray] | None = None,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Writes `model` with its matrices as `kind` (random ones for K types) and everything else in fp32."""
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[family], split_max_tensors=split_max_tensors)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    if tokenizer is None:
        writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    else:
        _add_tokenizer(writer, tokenizer)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    if family == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for seed, (name, tensor) in enumerate(_tensors(model).items()):
        is_matrix = tensor.ndim > 1 and "ffn_gate_inp" not in name
        if is_matrix and kind in _SCALES_AT:
            writer.add_tensor(name, random_blocks(tensor.shape, kind, seed), raw_dtype=kind)
        elif is_matrix and kind not in (Kind.F32, Kind.F16):
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.astype(np.float16) if is_matrix and kind == Kind.F16 else tensor)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    specials = {token["content"] for token in described["added_tokens"]}
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if each in specials else gguf.TokenType.NORMAL for each in tokens])
    writer.add_token_merges(
        [each if isinstance(each, str) else " ".join(each) for each in described["model"]["merges"]]
    )
    writer.add_chat_template(tokenizer.chat_template)


def _tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    config, tensors = model.config, {}
    is_gemma = "gemma" in config.model_type
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if is_gemma and name.endswith("norm.weight"):
            tensor = tensor + 1
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in name and config.model_type == "llama":
                tensor = tensor.view(count, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        for ours, theirs in (_NAMES | (_GEMMA if is_gemma else {})).items():
            name = name.replace(ours, theirs)
        stem = name.partition(".mlp.experts.")[0]
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            tensors |= {f"{stem}.ffn_gate_exps.weight": gate, f"{stem}.ffn_up_exps.weight": up}
        elif name.endswith("experts.down_proj"):
            tensors[f"{stem}.ffn_down_exps.weight"] = tensor
        else:
            tensors[name] = tensor
    return {name: tensor.detach().float().contiguous().numpy() for name, tensor in tensors.items()}


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Scores at every position, without a cache."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits
