"""Whether a model honours tree masks: a library upgrade that ignores or replaces them gives fluent, wrong text."""

import numpy as np
import torch

from specexec.lm import CachedLM, as_ids, score_tree
from specexec.tree import TokenTree

TOLERANCE = 0.3  # 16-bit noise is up to 0.12 (EPYC, AVX2), a mask that is not obeyed 1

_PARENTS = np.array([-1, -1, -1, 0, 1, 3])
_BRANCHES = ((0, 3, 5), (1, 4), (2,))


def tree_attention_error(lm: CachedLM) -> float:
    """How far the logits of a three-branch tree, scored at once, are from those of its branches alone.

    As a part of the distance at which they would be if each node saw all before it, which noise cannot reach and a
    library that ignores the mask does not stay below. Costs five passes and leaves `lm` empty. A model whose error is
    above TOLERANCE must be given chains.
    """
    ids = as_ids(np.random.default_rng(0).integers(0, lm.vocab_size, 16))
    context, tokens = ids[:10], ids[10:]
    together = _scored(lm, context, tokens, _PARENTS)
    unmasked = _scored(lm, context, tokens, np.arange(len(tokens)) - 1)
    errors = []
    for branch in _BRANCHES:
        lm.clear()
        alone = lm.prefill(np.concatenate([context, tokens[list(branch)]]))[0].float()
        at = 1 + branch[-1]
        errors.append(float((together[at] - alone).norm() / (unmasked[at] - alone).norm()))
    lm.clear()
    return float(torch.tensor(errors).max())  # NaN if any is


def _scored(lm: CachedLM, context: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
    lm.clear()
    return score_tree(lm, context, TokenTree(tokens, parents, np.zeros(len(tokens), np.float32))).float()
