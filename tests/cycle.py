"""A target that walks in a circle of tokens, and a draft that knows how if it reads the right thing in place."""

from collections.abc import Mapping

import numpy as np
import torch
from blocks import HEAD_DIM, THETA, plain_features, tensors_of
from tiny import VOCAB, tiny_model
from transformers import PreTrainedModel

from specexec.drafters import Drafter
from specexec.drafters.dflash_layout import block_drafter
from specexec.engine import generate
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams, make_sampler

PERIOD = 11
TOKENS = np.random.default_rng(0).permutation(np.arange(20, VOCAB))[:PERIOD]
CONSTANT = 1.0  # the first entry of every hidden state


def cyclic_target() -> tuple[PreTrainedModel, list[int]]:
    """A model that goes on with TOKENS in order, over and over, and a prompt of nearly two rounds.

    No layer looks at another token, but each makes of a token's state that of the third token after it, so that
    features of a wrong layer speak of a wrong token.
    """
    model = tiny_model("llama")
    states = np.random.default_rng(1).normal(size=(PERIOD, model.config.hidden_size))
    states[:, 0] = CONSTANT
    model.model.embed_tokens.weight[:, 0] = CONSTANT
    model.model.embed_tokens.weight[TOKENS] = _fp32(states)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.post_attention_layernorm.weight.fill_(1)
        lookup = _fp32(np.linalg.pinv(states / np.sqrt((states**2).mean(-1, keepdims=True))).T)
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            projection.weight.zero_()
        layer.mlp.gate_proj.weight[:PERIOD] = 30 * lookup
        layer.mlp.up_proj.weight[:PERIOD] = lookup
        layer.mlp.down_proj.weight[:, :PERIOD] = _fp32(np.roll(states, -3, axis=0) - states).T / 30
        states = np.roll(states, -3, axis=0)
    model.model.norm.weight.fill_(1)
    last = plain_features(model, np.append(TOKENS, 0), layers=[len(model.model.layers) - 1])  # normed already
    model.lm_head.weight.zero_()
    model.lm_head.weight[np.roll(TOKENS, -1)] = _fp32(last)
    return model, np.tile(TOKENS, 2)[:-3].tolist()


def looking_back(model: PreTrainedModel, layout: str, lag: int) -> dict[str, torch.Tensor]:
    """A DFlash draft whose first layer reads what stands `lag` positions before each place of the block.

    The query is the key turned back by `lag` positions, so that the rotary embedding does the search. What it finds
    there, made of the target's features by `fc`, tells what the target's head reads of that token.
    """
    tensors = {
        name: torch.ones_like(tensor) if "norm" in name else torch.zeros_like(tensor)
        for name, tensor in tensors_of(layout).items()
    }
    around = np.append(TOKENS, 0)
    wanted = plain_features(model, around, layers=[len(model.model.layers) - 1])
    directions = np.linalg.svd(wanted)[2][:PERIOD]  # those that the tokens span
    found = np.c_[np.full(PERIOD, CONSTANT), wanted @ directions.T]
    tensors["fc.weight"][: PERIOD + 1] = _fp32(np.linalg.lstsq(plain_features(model, around), found, rcond=None)[0].T)
    own = {name: tensors[f"layers.0.self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    half = HEAD_DIM // 2
    angles = lag * THETA ** (-np.arange(half) / half)
    own["q_proj"][:HEAD_DIM, 0] = _fp32(np.r_[np.cos(angles), -np.sin(angles)])
    own["k_proj"][:half, 0] = 1
    own["v_proj"][:PERIOD, 1 : PERIOD + 1] = torch.eye(PERIOD)
    own["o_proj"][:, :PERIOD] = 1000 * _fp32(directions.T)
    tensors["layers.0.self_attn.q_norm.weight"].fill_(200)
    if "embed_tokens.weight" in tensors:
        tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.clone()
        tensors["lm_head.weight"] = model.lm_head.weight.clone()
    return tensors


def _fp32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).float()


def accepted(
    model: PreTrainedModel,
    prompt: list[int],
    config: dict,
    tensors: Mapping[str, torch.Tensor],
    *,
    drafter: Drafter | None = None,
    target: CachedLM | None = None,
) -> float:
    """Guesses accepted per pass that had any, of a run as long as four full blocks and their bonus tokens."""
    target = target or CachedLM(model, 200)
    drafter = drafter or block_drafter(config, tensors, target)
    sampler = make_sampler(SamplingParams(), (), len(prompt))
    steps = list(generate(target, drafter, prompt, sampler, budget=24, max_tokens=41))
    start = len(prompt) % PERIOD
    text = [token for step in steps for token in step.tokens]
    assert text == [int(TOKENS[(start + i) % PERIOD]) for i in range(41)], "the target does not walk in a circle"
    full = [step for step in steps[1:-1] if len(step.tree)]
    return float(np.mean([step.accepted for step in full]))
