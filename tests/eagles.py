"""Random EAGLE-3 heads in every public layout, and their forward pass written out in numpy."""

import math

import numpy as np
import torch
from tiny import VOCAB

from specexec.tree import TokenTree

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "num_hidden_layers": 1,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def layer_shapes(
    prefix: str, *, hidden: int = 64, head_dim: int = 16, wide: bool = True, qk_norm: bool = False
) -> dict:
    """Shapes of one decoder layer's tensors; `wide`: it reads embedding and hidden state side by side."""
    size = 2 * hidden if wide else hidden
    shapes = {
        "self_attn.q_proj": (4 * head_dim, size),
        "self_attn.k_proj": (2 * head_dim, size),
        "self_attn.v_proj": (2 * head_dim, size),
        "self_attn.o_proj": (hidden, 4 * head_dim),
        "mlp.gate_proj": (80, hidden),
        "mlp.up_proj": (80, hidden),
        "mlp.down_proj": (hidden, 80),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        **({"hidden_norm": (hidden,)} if wide else {}),
        **({"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)} if qk_norm else {}),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def layouts() -> dict[str, tuple[dict, dict, dict]]:
    """By name: config.json, shapes of the tensors, and what the reference must know: prefix, layers, options."""
    head = {"fc.weight": (64, 192), "norm.weight": (64,), "lm_head.weight": (96, 64), "d2t": (96,)}
    small = {**SHAPE, "draft_vocab_size": 96}
    ids = [0, 2, 4]
    full = {"fc.weight": (64, 320), "norm.weight": (64,), "lm_head.weight": (VOCAB, 64)}
    own = {"embed_tokens.weight": (VOCAB, 64)}
    nested = {key: value for key, value in SHAPE.items() if key != "rope_theta"}
    return {
        "safeailab": (small, {**head, "t2d": (VOCAB,), **layer_shapes("midlayer.")}, {"ids": [1, 2, 2]}),
        "angelslim": (
            {**SHAPE, "head_dim": 32},
            {
                "model.fc.weight": (64, 192),
                "model.norm.weight": (64,),
                "lm_head.weight": (VOCAB, 64),
                **layer_shapes("model.midlayer.", head_dim=32),
            },
            {"ids": [1, 2, 2], "prefix": "model."},
        ),
        "specforge": (
            {**small, "fc_norm": True, "norm_output": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}},
            {**head, "t2d": (VOCAB,), **{f"fc_norm.{i}.weight": (64,) for i in range(3)}, **layer_shapes("midlayer.")},
            {"ids": ids, "norm_output": True},
        ),
        "modelopt": (
            {
                **small,
                "num_hidden_layers": 2,
                "rope_scaling": YARN,
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": ids,
                    "use_aux_hidden_state": True,
                    "use_input_layernorm_in_first_layer": True,
                    "use_last_layernorm": True,
                    "use_mtp_layernorm": False,
                    "next_layer_regular": True,
                    "parallel_draft_step": 1,
                },
            },
            {**head, **layer_shapes("layers.0."), **layer_shapes("layers.1.", wide=False)},
            {"ids": ids, "first": "layers.0.", "others": ["layers.1."], "yarn": True},
        ),
        "modelopt without norms": (
            {
                **SHAPE,
                "eagle_config": {"use_input_layernorm_in_first_layer": False, "use_last_layernorm": False},
            },
            {
                "fc.weight": (64, 192),
                **{name: shape for name, shape in layer_shapes("layers.0.").items() if "input_layernorm" not in name},
            },
            {"ids": [1, 2, 2], "first": "layers.0."},
        ),
        "speculators": (
            {
                "speculators_model_type": "eagle3",
                "transformer_layer_config": {
                    **nested,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                },
                "draft_vocab_size": 96,
                "eagle_aux_hidden_state_layer_ids": [0, 3, 5],
                "norm_before_residual": True,
                "norm_before_fc": True,
                "embed_requires_grad": False,
            },
            {**head, **own, "t2d": (VOCAB,), "input_norm.weight": (192,), **layer_shapes("layers.0.")},
            {"ids": [-1, 2, 4], "first": "layers.0.", "norm_before_residual": True},
        ),
        "deepspec": (
            {**SHAPE, "target_layer_ids": [0, 1, 2, 3, 4], "num_target_layers": 6, "model_type": "qwen3"},
            {**full, **own, **layer_shapes("layers.0.", qk_norm=True)},
            {"ids": [0, 1, 2, 3, 4], "first": "layers.0."},
        ),
        "another width": (
            {**SHAPE, "hidden_size": 32, "target_hidden_size": 64, "head_dim": 16},
            {
                "fc.weight": (32, 192),
                "norm.weight": (32,),
                "lm_head.weight": (VOCAB, 32),
                "embed_tokens.weight": (VOCAB, 32),
                **layer_shapes("midlayer.", hidden=32),
            },
            {"ids": [1, 2, 2]},
        ),
    }


LAYOUTS = tuple(layouts())


def stored(name: str) -> tuple[dict, dict[str, torch.Tensor], dict]:
    """A random head in a layout: config, tensors by public name, and the reference's facts."""
    config, shapes, facts = layouts()[name]
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for key, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[key] = 1 + 0.2 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    if "d2t" in shapes:
        ids = torch.randperm(VOCAB, generator=generator)[:96].sort().values
        tensors["d2t"] = ids - torch.arange(96)
        if "t2d" in tensors:
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return config, tensors, facts


class Reference:
    """The head in numpy, float64, one pair after another, from the description of the published forward pass."""

    def __init__(self, config: dict, tensors: dict[str, torch.Tensor], facts: dict, embedding, lm_head) -> None:
        prefix = facts.get("prefix", "")
        self.w = {name.removeprefix(prefix).removesuffix(".weight"): t.double().numpy() for name, t in tensors.items()}
        self.layers = [facts.get("first", "midlayer."), *facts.get("others", [])]
        self.facts = facts
        self.embedding = self.w.get("embed_tokens", embedding.double().numpy())
        self.lm_head = self.w.get("lm_head", lm_head.double().numpy())
        shape = config.get("transformer_layer_config", config)
        self.head_dim = shape.get("head_dim") or shape["hidden_size"] // 4
        self.theta = 500.0
        self.rows = [[] for _ in self.layers]

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.w[name] if name in self.w else x

    def fuse(self, features: np.ndarray) -> np.ndarray:
        if "fc_norm.0" in self.w:
            features = np.concatenate([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(np.split(features, 3))])
        return self.w["fc"] @ self.norm(features, "input_norm")

    def rope(self, x: np.ndarray, position: int) -> np.ndarray:
        half = self.head_dim // 2
        frequencies = self.theta ** (-np.arange(half) / half)
        size = 1.0
        if self.facts.get("yarn"):
            edges = [half * math.log(64 / (turns * 2 * math.pi)) / math.log(self.theta) for turns in (32, 1)]
            low, high = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), self.head_dim - 1)
            ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
            frequencies = frequencies * (1 - ramp) + frequencies / 4 * ramp
            size = 0.1 * math.log(4) + 1
        angle = position * frequencies
        first, second = x[:, :half], x[:, half:]
        turned = [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
        return np.concatenate(turned, axis=1) * size

    def attend(self, number: int, x: np.ndarray, position: int, rows: list) -> np.ndarray:
        stem = f"{self.layers[number]}self_attn."
        q, k, v = (
            (self.w[f"{stem}{name}_proj"] @ x).reshape(heads, self.head_dim)
            for name, heads in (("q", 4), ("k", 2), ("v", 2))
        )
        q = self.rope(self.norm(q, f"{stem}q_norm"), position)
        k = self.rope(self.norm(k, f"{stem}k_norm"), position)
        rows.append((k, v))
        output = []
        for head in range(4):
            scores = np.array([q[head] @ key[head // 2] for key, _ in rows]) / math.sqrt(self.head_dim)
            weights = np.exp(scores - scores.max())
            output.append((weights / weights.sum()) @ np.array([value[head // 2] for _, value in rows]))
        return self.w[f"{stem}o_proj"] @ np.concatenate(output)

    def mlp(self, stem: str, x: np.ndarray) -> np.ndarray:
        gate = self.w[f"{stem}mlp.gate_proj"] @ x
        return self.w[f"{stem}mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * (self.w[f"{stem}mlp.up_proj"] @ x))

    def step(self, hidden: np.ndarray, token: int, position: int, rows: list[list]) -> tuple[np.ndarray, np.ndarray]:
        """The next recurrent hidden state and the logits of the draft vocabulary; adds to `rows` of each layer."""
        stem = self.layers[0]
        normed = self.norm(hidden, f"{stem}hidden_norm")
        x = np.concatenate([self.norm(self.embedding[token], f"{stem}input_layernorm"), normed])
        h = (normed if self.facts.get("norm_before_residual") else hidden) + self.attend(0, x, position, rows[0])
        h = h + self.mlp(stem, self.norm(h, f"{stem}post_attention_layernorm"))
        for number, stem in enumerate(self.layers[1:], 1):
            h = h + self.attend(number, self.norm(h, f"{stem}input_layernorm"), position, rows[number])
            h = h + self.mlp(stem, self.norm(h, f"{stem}post_attention_layernorm"))
        logits = self.lm_head @ self.norm(h, "norm")
        return (self.norm(h, "norm") if self.facts.get("norm_output") else h), logits

    def scatter(self, logits: np.ndarray) -> np.ndarray:
        if "d2t" not in self.w:
            return logits
        result = np.full(VOCAB, -np.inf)
        for draft_id, value in enumerate(logits):
            result[draft_id + int(self.w["d2t"][draft_id])] = value
        return result

    def scores(self, features: np.ndarray, context: np.ndarray, tree: TokenTree) -> np.ndarray:
        """Logits [1 + N, V] behind the root and each node, every branch on its own."""
        rows = [[] for _ in self.layers]
        for i in range(len(context) - 1):
            hidden, logits = self.step(self.fuse(features[i]), int(context[i + 1]), i, rows)
        after = {-1: (hidden, rows)}
        result = [self.scatter(logits)]
        depth = {-1: 0}
        for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            hidden, seen = after[parent]
            seen = [list(each) for each in seen]
            depth[node] = depth[parent] + 1
            hidden, logits = self.step(hidden, token, len(context) - 2 + depth[node], seen)
            after[node] = hidden, seen
            result.append(self.scatter(logits))
        return np.stack(result)


def true_features(model: torch.nn.Module, context: np.ndarray, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        states = model(
            input_ids=torch.from_numpy(context[:-1])[None], use_cache=False, output_hidden_states=True
        ).hidden_states
    return torch.cat([states[i + 1][0] for i in ids], dim=-1).double().numpy()
