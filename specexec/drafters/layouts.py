"""What all layouts of learned drafts share: the target they must fit, a layer's settings, and the check of names."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Shapes = Mapping[str, tuple[int, ...]]
Sources = Mapping[str, tuple[str, ...]]  # by a tensor's name in a net: what is stored of it, several parts in order


@dataclass(frozen=True)
class TargetShape:
    """What a draft must agree with: the sizes of the target it is to guess for."""

    hidden_size: int
    num_layers: int
    vocab_size: int

    def require(self, *, hidden_size: int, vocab_size: int, layer_ids: Iterable[int] = ()) -> None:
        """ValueError that says what differs from the target that the draft was made for."""
        for name, made_for, given in (
            ("hidden size", hidden_size, self.hidden_size),
            ("vocabulary size", vocab_size, self.vocab_size),
        ):
            if made_for != given:
                raise ValueError(f"the draft was made for another target: {name} {made_for:,}, this one's is {given:,}")
        beyond = [layer for layer in layer_ids if not -1 <= layer < self.num_layers]
        if beyond:
            raise ValueError(
                f"the draft was made for another target: it reads layers {beyond}, this one has {self.num_layers}"
            )


@dataclass(frozen=True)
class AttentionShape:
    """A decoder layer's sizes and rotary embedding, as nearly every config.json spells them."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]
    rotary_factor: float
    max_positions: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "AttentionShape":
        """ValueError naming the key that is missing, or the activation that is not silu."""
        missing = [key for key in ("hidden_size", "num_attention_heads", "vocab_size") if key not in config]
        if missing:
            raise ValueError(f"the draft's config.json lacks {', '.join(missing)}")
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ValueError(f"the draft's activation is {config['hidden_act']!r}; only silu is supported")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return cls(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=scaling.get("rope_theta") or config.get("rope_theta") or 10000.0,
            rope_scaling=scaling,
            rotary_factor=scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0,
            max_positions=config.get("max_position_embeddings") or 2048,
        )


def has_any(names: Iterable[str], *parts: str) -> bool:
    """Whether one of `parts` occurs in one of `names`."""
    return any(part in name for name in names for part in parts)


def require_all(net: nn.Module, shapes: Shapes, sources: Sources) -> None:
    """ValueError with the list if a stored tensor has no place in `net`, a place has no tensor, or a shape differs.

    shapes: of what is stored, by stored name.
    """
    places = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    used = {name for place in places for name in sources.get(place, ())}
    lacking = [place for place in places if not sources.get(place) or not shapes.keys() >= set(sources[place])]
    for fault, found in (
        ("has tensors that this layout has no place for", sorted(shapes.keys() - used)),
        ("lacks tensors", [", ".join(sources.get(place, (place,))) for place in lacking]),
    ):
        if found:
            raise ValueError(f"the draft {fault}: {', '.join(found)}")
    other = [
        f"{name} {list(shapes[name])}"
        for place, shape in places.items()
        for name in sources[place]
        if not _fits(shapes[name], shape, len(sources[place]))
    ]
    if other:
        raise ValueError(f"the draft has tensors of another shape than its config.json promises: {', '.join(other)}")


def fill(net: nn.Module, sources: Sources, read: Callable[[str], torch.Tensor], dtype: torch.dtype) -> None:
    """Give `net` (on meta) its tensors, as `require_all` has found them; `read` gives one by its stored name."""
    state = {}
    for place, tensor in net.state_dict().items():
        parts = [read(name) for name in sources[place]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts).reshape(tensor.shape)
        state[place] = whole.to(dtype if whole.is_floating_point() else torch.int64)
    net.load_state_dict(state, assign=True)
    net.requires_grad_(False).eval()


def on_meta(build: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    """The net without storage, for its names and shapes."""
    with torch.device("meta"):
        return build(config)


def _fits(part: tuple[int, ...], place: tuple[int, ...], num_parts: int) -> bool:
    if num_parts == 1:
        return part == place
    return part[-1] == place[-1] and math.prod(part) * num_parts == math.prod(place)
