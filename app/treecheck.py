"""The check of tree attention at the first start with a model class, attention and library version; then remembered."""

import json

import torch
import transformers

from app.environment import cache_dir
from specexec.lm import CachedLM
from specexec.selfcheck import TOLERANCE, tree_attention_error


def honours_trees(lm: CachedLM) -> bool:
    """Whether `lm` gives a tree's branches the logits they have alone; costs five passes once per kind of model."""
    model = lm.model
    kind = f"{type(model).__name__}, {model.config._attn_implementation} attention, {lm.device.type}"
    key = f"{kind}, transformers {transformers.__version__}, torch {torch.__version__}"
    file = cache_dir() / "tree_masks.json"
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = {}
    if key not in known:
        known[key] = tree_attention_error(lm)
        partial = file.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(file)
    return known[key] <= TOLERANCE
