"""Random DFlash and DSpark checkpoints in every public layout, and their forward passes written out in numpy."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tiny import VOCAB
from transformers import PreTrainedModel

from specexec.drafters.layouts import TargetShape

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, NUM_LAYERS, RANK = 64, 40, 4, 2, 16, 2, 6
LAYERS = (0, 2)  # of the target, as layer-output ids
TARGET = TargetShape(HIDDEN, 4, VOCAB)  # what tiny models are
BLOCK, MASK, EPS, THETA = 5, 7, 1e-6, 10000.0
DFLASH, DSPARK = ("z-lab", "speculators", "DeepSpec"), ("DeepSpec", "SpecForge", "Model-Optimizer", "speculators")

_LAYER = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": NUM_LAYERS,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
}


def config_of(layout: str, head: str | None = None, *, num_ids: int = VOCAB) -> dict:
    """The config.json of a draft with a Markov head of type `head`, or without one: DFlash."""
    markov = {"markov_rank": RANK if head else 0, "markov_head_type": head or "vanilla"}
    markov["use_confidence_head" if layout == "Model-Optimizer" else "enable_confidence_head"] = head is not None
    if layout == "speculators":
        return {
            "speculators_model_type": "dspark" if head else "dflash",
            "architectures": ["DSparkSpeculator" if head else "DFlashSpeculator"],
            "transformer_layer_config": dict(_LAYER),
            "draft_vocab_size": num_ids,
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS],
            "sample_from_anchor": head is not None,
            **(markov if head else {}),
        }
    common = {**_LAYER, "block_size": BLOCK, "num_target_layers": 4}
    reading = {"mask_token_id": MASK, "target_layer_ids": list(LAYERS)}
    if layout == "DeepSpec":
        return {**common, **reading, **markov, "architectures": ["Qwen3DSparkModel"], "num_anchors": 8}
    if layout == "z-lab":
        return {**common, "architectures": ["DFlashDraftModel"], "dflash_config": reading}
    named = {"projector_type": "dspark", "shift_label": True} if layout == "Model-Optimizer" else {}
    return {**common, "architectures": ["DSparkDraftModel"], "dflash_config": {**reading, **markov, **named}}


def tensors_of(
    layout: str, head: str | None = None, *, num_ids: int = VOCAB, seed: int = 0, scale: float = 0.2
) -> dict[str, torch.Tensor]:
    """Random tensors for config_of's draft, named as the layout names them."""
    rng = np.random.default_rng(seed)
    shapes = {"fc.weight": (HIDDEN, len(LAYERS) * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for number in range(NUM_LAYERS):
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in _layer_shapes().items()}
    if layout == "DeepSpec":
        shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN)}
    if layout == "DeepSpec" or num_ids < VOCAB:
        shapes |= {"lm_head.weight": (num_ids, HIDDEN)}
    flat = layout == "Model-Optimizer"
    if head:
        prefix = "" if flat else "markov_head."
        shapes |= {f"{prefix}markov_w1.weight": (VOCAB, RANK), f"{prefix}markov_w2.weight": (num_ids, RANK)}
        sizes = {"gated": ("gate", RANK, HIDDEN + RANK), "rnn": ("joint", 3 * RANK, 2 * RANK + HIDDEN)}
        if head in sizes:
            name, rows, columns = sizes[head]
            shapes |= {f"{prefix}{name}_proj.weight": (rows, columns), f"{prefix}{name}_proj.bias": (rows,)}
        name = "confidence_proj" if flat else "confidence_head.proj"
        shapes |= {f"{name}.weight": (1, HIDDEN + RANK), f"{name}.bias": (1,)}
    tensors = {
        name: torch.from_numpy(rng.normal(1.0 if "norm" in name else 0.0, scale, shape)).float()
        for name, shape in shapes.items()
    }
    if num_ids < VOCAB:
        chosen = torch.from_numpy(np.sort(rng.choice(np.arange(3, VOCAB), num_ids, replace=False)))
        tensors |= {"d2t": chosen - torch.arange(num_ids), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
        tensors["t2d"][chosen] = True
    return tensors


def _layer_shapes() -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }


def plain_features(model: PreTrainedModel, context: np.ndarray, layers: Sequence[int] = LAYERS) -> np.ndarray:
    """What `layers` put out for every token before the root, from the library's own forward."""
    with torch.inference_mode():
        states = model(
            input_ids=torch.from_numpy(context[:-1])[None], use_cache=False, output_hidden_states=True
        ).hidden_states
    return torch.cat([states[layer + 1][0] for layer in layers], dim=-1).double().numpy()


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def turned(x: np.ndarray, position: int) -> np.ndarray:
    """One head's vector at a position, pair by pair."""
    half, out = len(x) // 2, x.copy()
    for i in range(half):
        angle = position * THETA ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def plain_hidden(
    tensors: Mapping[str, torch.Tensor],
    features: np.ndarray,
    block: np.ndarray,
    *,
    window: int | None = None,
    causal: bool = False,
) -> np.ndarray:
    """Normed hidden states [B, HIDDEN] of an embedded block [B, HIDDEN] behind `features`, a query at a time."""
    w = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x, start = block, len(context)
    for number in range(NUM_LAYERS):
        own = {name: w[f"layers.{number}.{name}.weight"] for name in _layer_shapes()}
        y = rms(x, own["input_layernorm"])
        source = np.concatenate([context, y])
        keys = rms((source @ own["self_attn.k_proj"].T).reshape(len(source), KV_HEADS, -1), own["self_attn.k_norm"])
        values = (source @ own["self_attn.v_proj"].T).reshape(len(source), KV_HEADS, -1)
        queries = rms((y @ own["self_attn.q_proj"].T).reshape(len(y), HEADS, -1), own["self_attn.q_norm"])
        read = np.zeros_like(queries)
        for slot in range(len(y)):
            at = start + slot
            seen = [p for p in range(len(source)) if not (causal and p > at) and not (window and abs(at - p) >= window)]
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                query = turned(queries[slot, head], at)
                scores = np.array([query @ turned(keys[p, group], p) for p in seen]) / np.sqrt(HEAD_DIM)
                weights = np.exp(scores - scores.max())
                read[slot, head] = weights / weights.sum() @ values[seen, group]
        x = x + read.reshape(len(y), -1) @ own["self_attn.o_proj"].T
        z = rms(x, own["post_attention_layernorm"])
        gate = z @ own["mlp.gate_proj"].T
        x = x + (gate * sigmoid(gate) * (z @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
    return rms(x, w["norm.weight"])


class PlainHeads:
    """The Markov and confidence heads of one block, a token at a time."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], head: str) -> None:
        self._w = {name.split("markov_head.")[-1]: tensor.double().numpy() for name, tensor in tensors.items()}
        self._head = head

    def after(self, token: int, hidden: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """The correction of a slot's logits after `token`, the next state, and the confidence in the slot's guess."""
        w, embedded = self._w, self._w["markov_w1.weight"][token]
        latent = embedded
        if self._head == "gated":
            joined = np.concatenate([hidden, embedded])
            latent = sigmoid(w["gate_proj.weight"] @ joined + w["gate_proj.bias"]) * embedded
        if self._head == "rnn":
            joined = np.concatenate([state, embedded, hidden])
            gate, candidate, output = np.split(w["joint_proj.weight"] @ joined + w["joint_proj.bias"], 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            latent = np.tanh(output)
        name = "confidence_proj" if "confidence_proj.weight" in w else "confidence_head.proj"
        logit = w[f"{name}.weight"][0] @ np.concatenate([hidden, embedded]) + w[f"{name}.bias"][0]
        return w["markov_w2.weight"] @ latent, state, float(sigmoid(logit))
