"""New nets for a target, of the sizes that a recipe says, and what they and their tensors are called in public."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from specexec.drafters.dflash import BlockShape, DFlashNet
from specexec.drafters.dspark import DSparkNet, GatedMix, PlainMix, RecurrentMix
from specexec.drafters.eagle3 import Eagle3Config, Eagle3Net
from specexec.drafters.layouts import AttentionShape
from specexec.drafters.mtp import MtpConfig, MtpNet
from specexec.training.recipe import DraftRecipe

_MIXES = {"vanilla": lambda hidden, rank: PlainMix(), "gated": GatedMix, "rnn": RecurrentMix}
_PUBLIC = (  # what the nets' names differ in from those of speculators
    (re.compile(r"backbone\.(.*)"), r"\1"),
    (re.compile(r"(markov_w[12]\..*)"), r"markov_head.\1"),
    (re.compile(r"confidence_proj\.(.*)"), r"confidence_head.proj.\1"),
)
_PUBLIC_MTP = (
    (re.compile(r"layers\.(\d+)\.block\.(.*)"), r"mtp_layers.\1.\2"),
    (re.compile(r"layers\.(\d+)\.embed_norm\.(.*)"), r"mtp_layers.\1.token_layernorm.\2"),
    (re.compile(r"layers\.(\d+)\.hidden_norm\.(.*)"), r"mtp_layers.\1.hidden_layernorm.\2"),
    (re.compile(r"layers\.(\d+)\.fc\.(.*)"), r"mtp_layers.\1.input_proj.\2"),
    (re.compile(r"layers\.(\d+)\.norm\.(.*)"), r"mtp_layers.\1.final_layernorm.\2"),
)
_ARCHITECTURES = {
    "eagle3": "Eagle3DraftModel",
    "mtp": "MTPDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkSpeculator",
}


def feature_layers(kind: str, recipe: DraftRecipe, num_layers: int) -> tuple[int, ...]:
    """The recipe's, or what is usual: EAGLE-3's low, middle and high layer, or DFlash's num_features of them, spread
    from layer 1 to the third last; none for MTP and students, which read what the target's head reads, or text.
    ValueError for an MTP draft that is to be more than one layer before the target's own head."""
    if kind == "mtp":
        usual = DraftRecipe()
        names = ("layers", "vocabulary", "own_head", "num_layers")
        if wrong := [f"draft.{name}" for name in names if getattr(recipe, name) != getattr(usual, name)]:
            raise ValueError(f"an MTP draft is one layer before the target's own head: leave out {', '.join(wrong)}")
    if kind in ("mtp", "distill"):
        return ()
    if recipe.layers is not None:
        return recipe.layers
    if kind == "eagle3":
        return 1, num_layers // 2 - 1, num_layers - 4
    count = recipe.num_features
    return (
        tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)) if count > 1 else (num_layers // 2,)
    )


def eagle3_net(recipe: DraftRecipe, target: PretrainedConfig, vocabulary: np.ndarray | None) -> Eagle3Net:
    """vocabulary: the target's ids that it is to guess, ascending; None for all."""
    layer = _attention(recipe, target)
    config = Eagle3Config(
        hidden_size=layer.hidden_size,
        target_hidden_size=layer.hidden_size,
        layer_ids=feature_layers("eagle3", recipe, target.num_hidden_layers),
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size if vocabulary is None else len(vocabulary),
        intermediate_size=recipe.intermediate or target.intermediate_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        num_layers=recipe.num_layers,
        eps=layer.eps,
        rope_theta=layer.rope_theta,
        rope_scaling=layer.rope_scaling,
        max_positions=layer.max_positions,
        mapped=vocabulary is not None,
        own_head=recipe.own_head,
    )
    return _mapped(Eagle3Net(config), vocabulary)


def mtp_net(recipe: DraftRecipe, target: PretrainedConfig) -> MtpNet:
    """One layer, which all steps share."""
    layer = _attention(recipe, target)
    return MtpNet(
        MtpConfig(
            hidden_size=layer.hidden_size,
            num_layers=1,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            intermediate_size=recipe.intermediate or target.intermediate_size,
            eps=layer.eps,
            rope_theta=layer.rope_theta,
            rope_scaling=layer.rope_scaling,
            rotary_factor=layer.rotary_factor,
            max_positions=layer.max_positions,
        )
    )


def block_net(
    kind: str, recipe: DraftRecipe, target: PretrainedConfig, vocabulary: np.ndarray | None, *, mask_token: int
) -> DFlashNet | DSparkNet:
    """kind: "dflash" or "dspark"; mask_token: an id that stands for what is to be guessed; vocabulary: as above."""
    layer = _attention(recipe, target)
    shape = BlockShape(
        hidden=layer.hidden_size,
        inner=recipe.intermediate or target.intermediate_size,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        eps=layer.eps,
        target_layers=feature_layers(kind, recipe, target.num_hidden_layers),
        target_hidden=layer.hidden_size,
        block_size=recipe.block_size,
        mask_token=mask_token,
        anchor_first=kind == "dspark",
        windows=(None,) * recipe.num_layers,
        causal=(False,) * recipe.num_layers,
        vocab_size=target.vocab_size,
        num_ids=target.vocab_size if vocabulary is None else len(vocabulary),
        own_head=recipe.own_head,
        theta=layer.rope_theta,
        scaling=layer.rope_scaling,
        rotary_factor=layer.rotary_factor,
        max_positions=layer.max_positions,
        softcap=getattr(target, "final_logit_softcapping", None),
    )
    if kind == "dflash":
        return _mapped(DFlashNet(shape), vocabulary)
    mix = _MIXES[recipe.markov_head](shape.hidden, recipe.markov_rank)
    net = DSparkNet(shape, recipe.markov_rank, mix, "markov" if recipe.confidence else None)
    nn.init.zeros_(net.markov_w2.weight)  # it corrects nothing until it has learned to
    _mapped(net.backbone, vocabulary)
    return net


def public_config(
    net: Eagle3Net | MtpNet | DFlashNet | DSparkNet, target: PretrainedConfig, name: str
) -> dict[str, Any]:
    """config.json as speculators has it; `name`: of the target."""
    kind = {Eagle3Net: "eagle3", MtpNet: "mtp", DFlashNet: "dflash", DSparkNet: "dspark"}[type(net)]
    if isinstance(net, Eagle3Net):
        own, ahead = _eagle3_keys(net), 5
    elif isinstance(net, MtpNet):
        own, ahead = _mtp_keys(net, target.vocab_size), 3
    else:
        own, ahead = _block_keys(net), net.shape.num_slots
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": ahead,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": name, "architectures": target.architectures},
        },
        "torch_dtype": "bfloat16",
        **own,
    }


def public_tensors(net: nn.Module, vocab_size: int) -> dict[str, torch.Tensor]:
    """The net's tensors by their public names, in bf16, with t2d, which marks the tokens that it can guess."""
    tensors = {}
    for name, tensor in net.state_dict().items():
        for pattern, public in _PUBLIC_MTP if isinstance(net, MtpNet) else _PUBLIC:
            name = pattern.sub(public, name) if pattern.fullmatch(name) else name
        if name.startswith("mix.proj."):
            stem = "gate_proj" if isinstance(net.mix, GatedMix) else "joint_proj"
            name = f"markov_head.{stem}.{name.removeprefix('mix.proj.')}"
        kept = tensor.detach().cpu()
        tensors[name] = (kept.bfloat16() if kept.is_floating_point() else kept).contiguous()
    if "d2t" in tensors:
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
        tensors["t2d"][tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
    return tensors


def _attention(recipe: DraftRecipe, target: PretrainedConfig) -> AttentionShape:
    """A layer's sizes as the target has them, but for what the recipe says."""
    given = target.to_dict()
    rope = given.get("rope_parameters") or {}
    given["rope_parameters"] = rope.get("full_attention", rope)
    given["hidden_act"] = "silu"
    for key, value in (
        ("num_attention_heads", recipe.heads),
        ("num_key_value_heads", recipe.kv_heads),
        ("head_dim", recipe.head_dim),
    ):
        given[key] = value or given.get(key)
    return AttentionShape.read(given)


def _mapped(net: Any, vocabulary: np.ndarray | None) -> Any:
    if vocabulary is not None:
        net.d2t.copy_(torch.from_numpy(vocabulary) - torch.arange(len(vocabulary)))
    return net


def _layer_keys(shape: Any, vocab_size: int, **sizes: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["inner"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "vocab_size": vocab_size,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
    }


def _indices(layers: Sequence[int]) -> list[int]:
    """As speculators counts layers: the first one's output has number 1."""
    return [layer + 1 for layer in layers]


def _mtp_keys(net: MtpNet, vocab_size: int) -> dict[str, Any]:
    config = net.config
    layer = _layer_keys(
        config,
        vocab_size,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
    )
    layer |= {"num_hidden_layers": 1, "rope_parameters": _rope(config.rope_scaling, config.rope_theta)}
    return {"num_nextn_predict_layers": 1, "transformer_layer_config": layer}


def _eagle3_keys(net: Eagle3Net) -> dict[str, Any]:
    config = net.config
    layer = _layer_keys(
        config,
        config.vocab_size,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
    )
    layer |= {"num_hidden_layers": config.num_layers, "rope_parameters": _rope(config.rope_scaling, config.rope_theta)}
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": _indices(config.layer_ids),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        "transformer_layer_config": layer,
    }


def _block_keys(net: DFlashNet | DSparkNet) -> dict[str, Any]:
    shape = net.shape
    sizes = {"hidden": shape.hidden, "inner": shape.inner, "heads": shape.heads, "kv_heads": shape.kv_heads}
    layer = _layer_keys(shape, shape.vocab_size, **sizes)
    layer |= {"num_hidden_layers": len(shape.windows), "rope_parameters": _rope(shape.scaling or {}, shape.theta)}
    keys = {
        "draft_vocab_size": shape.num_ids,
        "aux_hidden_state_layer_ids": _indices(shape.target_layers),
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token,
        "sample_from_anchor": shape.anchor_first,
        "transformer_layer_config": layer,
    }
    if shape.softcap is not None:
        keys["final_logit_softcapping"] = shape.softcap
    if isinstance(net, DSparkNet):
        head = {PlainMix: "vanilla", GatedMix: "gated", RecurrentMix: "rnn"}[type(net.mix)]
        keys |= {
            "markov_rank": net.markov_w1.embedding_dim,
            "markov_head_type": head,
            "enable_confidence_head": net.confidence_proj is not None,
        }
    return keys


def _rope(scaling: Mapping[str, Any], theta: float) -> dict[str, Any]:
    return {**scaling, "rope_theta": theta, "rope_type": scaling.get("rope_type", "default")}
