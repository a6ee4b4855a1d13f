"""Random MTP layers in every public layout: the library's decoder layers between norms and a joining projection."""

import sys

import numpy as np
import torch
from tiny import VOCAB
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from specexec.tree import TokenTree

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "n_shared_experts": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
FULL = {"layer_types": ["full_attention"] * 4}
QUARTER = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}, "head_dim": 32}

# By layout: the library's layer, which of its layers, the config, the number of MTP layers, recurrent norm, names.
_LAYOUTS = {
    "glm": (
        Glm4MoeDecoderLayer,
        3,
        {
            **SHAPE,
            **MOE,
            **GROUPS,
            "model_type": "glm4_moe",
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        1,
    ),
    "glm two dense": (
        Glm4MoeDecoderLayer,
        0,
        {**SHAPE, **MOE, **GROUPS, "model_type": "glm4_moe", "head_dim": 16, "first_k_dense_replace": 9},
        2,
    ),
    "deepseek": (
        DeepseekV3DecoderLayer,
        3,
        {
            **SHAPE,
            **MOE,
            **GROUPS,
            **LATENT,
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        1,
    ),
    "deepseek plain queries": (
        DeepseekV3DecoderLayer,
        0,
        {**SHAPE, **MOE, **GROUPS, **LATENT, "model_type": "deepseek_v3", "q_lora_rank": None, "rope_parameters": ROPE},
        1,
    ),
    "qwen moe": (
        Qwen3NextDecoderLayer,
        3,
        {
            **SHAPE,
            **MOE,
            **FULL,
            **QUARTER,
            "model_type": "qwen3_next",
            "num_experts": 4,
            "shared_expert_intermediate_size": 40,
        },
        1,
    ),
    "qwen two": (Qwen3_5DecoderLayer, 3, {**SHAPE, **FULL, **QUARTER, "model_type": "qwen3_5_text"}, 2),
    "speculators": (Qwen3DecoderLayer, 0, {**SHAPE, "model_type": "qwen3", "head_dim": 16, "rope_parameters": ROPE}, 1),
}
_AROUND = {
    "glm": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "speculators": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}
LAYOUTS = tuple(_LAYOUTS)


class Reference:
    """MTP layers of one family: the library's decoder layer between norms and a joining projection of plain torch."""

    def __init__(self, name: str) -> None:
        layer_class, index, config, count = _LAYOUTS[name]
        self.family = name.split()[0]
        self.config = AutoConfig.for_model(**config)
        self.config._attn_implementation = self.config._experts_implementation = "eager"
        self.is_zero_centered = self.family == "qwen"
        generator = torch.Generator().manual_seed(3)
        self.blocks, self.around = [], []
        for _ in range(count):
            block = layer_class(self.config, index).requires_grad_(False).eval()
            for key, tensor in [*block.named_parameters(), *block.named_buffers()]:
                noise = torch.randn(tensor.shape, generator=generator)
                centre = 0.0 if self.is_zero_centered or "norm" not in key else 1.0
                tensor.copy_(centre + 0.2 * noise if tensor.dim() == 1 else noise * tensor.shape[-1] ** -0.5)
            self.blocks.append(block)
            sizes = ((64,), (64,), (64, 128), (64,))
            around = [torch.randn(size, generator=generator) * (0.2 if len(size) == 1 else 0.1) for size in sizes]
            self.around.append([part + (part.dim() == 1 and not self.is_zero_centered) for part in around])
        if self.family == "qwen":
            self.around = [self.around[0]] * count
        module = sys.modules[layer_class.__module__]
        rotary = next(
            getattr(module, key) for key in dir(module) if key.endswith("RotaryEmbedding") and "Vision" not in key
        )
        self.rotary = rotary(self.config)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        weight = weight + 1 if self.is_zero_centered else weight
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

    def row(self, k: int, embed: torch.Tensor, hidden: torch.Tensor, rows: list[torch.Tensor], places: list[int]):
        """Layer k's recurrent and head's state of the last of `rows`, which grow by this one at places[-1]."""
        embed_norm, hidden_norm, fc, final = self.around[k]
        eps = self.config.rms_norm_eps
        rows.append(fc @ torch.cat([self.norm(embed, embed_norm, eps), self.norm(hidden, hidden_norm, eps)]))
        x, positions = torch.stack(rows)[None], torch.tensor(places)[None]
        mask = torch.full((len(rows), len(rows)), torch.finfo(torch.float32).min).triu(1)[None, None]
        output = self.blocks[k](
            x, position_embeddings=self.rotary(x, positions), attention_mask=mask, position_ids=positions
        )
        output = (output[0] if isinstance(output, tuple) else output)[0, -1]
        normed = self.norm(output, final, eps)
        return (output if self.family in ("glm", "deepseek") else normed), normed

    def scores(self, model: torch.nn.Module, context: np.ndarray, tree: TokenTree) -> torch.Tensor:
        """Logits [1 + N, V] behind the root and each node, every branch on its own."""
        embed, head, count = model.model.embed_tokens.weight, model.lm_head.weight, len(self.blocks)
        with torch.inference_mode():
            features = model(
                input_ids=torch.from_numpy(context)[None], use_cache=False, output_hidden_states=True
            ).hidden_states[-1][0]
        rows, places, states = [[] for _ in range(count)], [[] for _ in range(count)], [{} for _ in range(count)]
        outputs = {}
        for k in range(count):
            for token in range(k + 1, len(context)):
                before = features[token - 1] if k == 0 else states[k - 1][token - 1]
                places[k].append(token - 1)
                states[k][token], outputs[k] = self.row(k, embed[context[token]], before, rows[k], places[k])
        result = [head @ outputs[0]]
        root = len(context) - 1
        nodes = {-1: (0, rows, places, [states[k].get(root) for k in range(count)])}
        for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            depth, rows, places, before = nodes[parent]
            depth, rows, places = depth + 1, [list(each) for each in rows], [list(each) for each in places]
            after = list(before)
            for k in range(count):
                if k >= depth or (depth >= count and k == depth % count):
                    places[k].append(root - 1 + depth)
                    after[k], outputs[k] = self.row(k, embed[token], before[k - 1], rows[k], places[k])
            nodes[node] = depth, rows, places, after
            result.append(head @ outputs[depth % count])
        return torch.stack(result)

    def stored(self) -> tuple[dict, dict[str, torch.Tensor]]:
        """config.json and tensors as the family's checkpoints hold them."""
        tensors = {}
        for k, (block, around) in enumerate(zip(self.blocks, self.around, strict=True)):
            stem = {"qwen": f"mtp.layers.{k}.", "speculators": f"mtp_layers.{k}."}.get(
                self.family, f"model.layers.{4 + k}."
            )
            outer = "mtp." if self.family == "qwen" else stem
            for key, tensor in zip(_AROUND[self.family], around, strict=True):
                tensors[f"{outer}{key}.weight"] = tensor
            for key, tensor in block.state_dict().items():
                tensors |= {f"{stem}{name}": part for name, part in _unfused(key, tensor)}
            if self.family in ("glm", "deepseek"):
                tensors[f"{stem}embed_tokens.weight"] = torch.zeros(VOCAB, 64)
                tensors[f"{stem}shared_head.head.weight"] = torch.zeros(VOCAB, 64)
        config = self.config.to_dict()
        return ({"transformer_layer_config": config} if self.family == "speculators" else config), tensors


def _unfused(key: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Checkpoints hold each expert's matrices apart, the library holds them together."""
    if key.endswith("experts.gate_up_proj"):
        stem = key.removesuffix("gate_up_proj")
        halves = [
            (e, name, half)
            for e, both in enumerate(tensor)
            for name, half in zip(("gate", "up"), both.chunk(2), strict=True)
        ]
        return [(f"{stem}{e}.{name}_proj.weight", half.clone()) for e, name, half in halves]
    if key.endswith("experts.down_proj"):
        stem = key.removesuffix("down_proj")
        return [(f"{stem}{e}.down_proj.weight", part.clone()) for e, part in enumerate(tensor)]
    return [(key, tensor)]
