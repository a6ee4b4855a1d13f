"""Which stored tensors make which parameters: transformers' own renamings and conversions, applied to headers only."""

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from offload.entries import TensorEntry


@dataclass(frozen=True)
class Recipe:
    """Parameters `targets` made from `sources`; each source came in under one of the converter's patterns.

    Without a converter the one source is the one target.
    """

    targets: tuple[str, ...]
    sources: tuple[TensorEntry, ...]
    patterns: tuple[str, ...] = ()
    converter: WeightConverter | None = None

    def grows_to(self, dtype: torch.dtype) -> bool:
        """Whether values in `dtype` take more bytes than what is stored."""
        return any(entry.encoding is not None or entry.dtype.itemsize < dtype.itemsize for entry in self.sources)

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """Everything that has to be read."""
        return tuple(part for entry in self.sources for part in entry.parts)

    def regions(self, target: torch.Tensor) -> list[torch.Tensor] | None:
        """The part of `target` that each source fills as it is, or None if they have to be computed."""
        if self.converter is None:
            return [target]
        operations = list(self.converter.operations)
        stacked = isinstance(operations[0], MergeModulelist) and operations.pop(0).dim == 0
        dim = operations.pop(0).dim if operations and isinstance(operations[0], Concatenate) else None
        if operations or len(self.targets) > 1 or not (stacked or dim is not None):
            return None
        regions: dict[int, torch.Tensor] = {}
        start = 0
        for pattern in self.converter.source_patterns:
            members = [i for i, own in enumerate(self.patterns) if own == pattern]
            for position, i in enumerate(members):
                region = target[position] if stacked else target
                if dim is not None:
                    axis = dim - stacked
                    size = self.sources[i].shape[axis]
                    region = region.narrow(axis, start, size)
                    start += 0 if stacked else size
                regions[i] = region
            if stacked and dim is not None and members:
                start += self.sources[members[0]].shape[dim - 1]
        return [regions[i] for i in range(len(self.sources))]

    def convert(self, model: PreTrainedModel, sources: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs the converter itself on `sources`; gives every target by name."""
        converter = deepcopy(self.converter)
        for entry, pattern, tensor in zip(self.sources, self.patterns, sources, strict=True):
            converter.add_tensor(self.targets[0], entry.name, pattern, tensor)
        made = converter.convert(self.targets[0], model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def match(model: PreTrainedModel, tensors: Mapping[str, TensorEntry]) -> list[Recipe]:
    """Recipes for every parameter and persistent buffer of `model`, a skeleton with untied weights.

    Raises ValueError that lists what is stored but unknown to the model, or needed but not stored.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    collected: dict[str, list[tuple[TensorEntry, str | None]]] = {}
    unexpected: list[str] = []
    for entry in sorted(tensors.values(), key=lambda entry: dot_natural_key(entry.name)):
        prefix = model.base_model_prefix
        target, pattern = rename_source_key(entry.name, renamings, converters, prefix, state)
        if target not in state and entry.name in state:
            target, pattern = rename_source_key(entry.name, [], [], prefix, state)
        if target in state:
            collected.setdefault(target, []).append((entry, pattern))
        else:
            unexpected.append(entry.name)
    recipes = [_recipe(target, members, by_pattern) for target, members in collected.items()]
    filled = {target for recipe in recipes for target in recipe.targets}
    _check(model, set(state) - filled, unexpected)
    for recipe in recipes:
        _check_shape(recipe, state)
    return recipes


def _recipe(
    target: str, members: list[tuple[TensorEntry, str | None]], by_pattern: Mapping[str, WeightConverter]
) -> Recipe:
    sources = tuple(entry for entry, _ in members)
    pattern = members[0][1]
    if pattern is None:
        if len(sources) > 1:
            raise ValueError(f"{target} is stored twice: as {sources[0].name} and as {sources[1].name}")
        return Recipe((target,), sources)
    converter = by_pattern[pattern]
    first, *others = converter.target_patterns
    targets = (target, *(target.replace(first, other) for other in others))
    return Recipe(targets, sources, tuple(str(pattern) for _, pattern in members), converter)


def _check(model: PreTrainedModel, missing: set[str], unexpected: list[str]) -> None:
    for one, other in model.all_tied_weights_keys.items():
        if not {one, other} <= missing:
            missing = missing - {one, other}
    if missing:
        raise ValueError(f"the checkpoint lacks {_some(missing)}, which {type(model).__name__} needs")
    last = model.config.get_text_config(decoder=True).num_hidden_layers
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    extra = [name for name in unexpected if not _matches(name, ignored) and not _beyond(name, last)]
    if extra:
        raise ValueError(f"the checkpoint holds {_some(extra)}, which {type(model).__name__} does not use")


def _check_shape(recipe: Recipe, state: Mapping[str, torch.Tensor]) -> None:
    """What is copied must fill its parameter exactly; what is computed is checked by the conversion itself."""
    target = state[recipe.targets[0]]
    needed = target.numel() * len(recipe.targets)
    if len(recipe.targets) == 1 and sum(math.prod(entry.shape) for entry in recipe.sources) == needed:
        regions = recipe.regions(target)
        if regions is None or all(r.shape == e.shape for r, e in zip(regions, recipe.sources, strict=True)):
            return
    elif len(recipe.targets) > 1:
        return
    shapes = ", ".join(f"{entry.name} {list(entry.shape)}" for entry in recipe.sources[:2])
    raise ValueError(
        f"{recipe.targets[0]} has shape {list(target.shape)} by the config, but the checkpoint has"
        f" {len(recipe.sources)} parts ({shapes}) in {recipe.sources[0].file}"
    )


def _beyond(name: str, last: int) -> bool:
    """Multi-token-prediction layers are stored after the last decoder layer."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= last


def _matches(name: str, patterns: set[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _some(names: set[str] | list[str]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
