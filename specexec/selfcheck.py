"""Whether a model honours tree masks: a library upgrade that ignores or replaces them gives fluent, wrong text."""

import numpy as np
import torch

from specexec.lm import CachedLM, as_ids, score_tree
from specexec.tree import TokenTree

TOLERANCE = 0.1  # 16-bit noise is some 0.02; one branch that sees another changes logits by more than this

_PARENTS = np.array([-1, -1, -1, 0, 1, 3])
_BRANCHES = ((0, 3, 5), (1, 4), (2,))


def tree_attention_error(lm: CachedLM) -> float:
    """Largest relative difference of logits between a three-branch tree scored at once and its branches scored alone.

    Costs four passes and leaves `lm` empty. A model whose error is above TOLERANCE must be given chains.
    """
    ids = as_ids(np.random.default_rng(0).integers(0, lm.vocab_size, 16))
    context, tokens = ids[:10], ids[10:]
    lm.clear()
    together = score_tree(lm, context, TokenTree(tokens, _PARENTS, np.zeros(len(tokens), np.float32)))
    errors = []
    for branch in _BRANCHES:
        lm.clear()
        alone = lm.prefill(np.concatenate([context, tokens[list(branch)]]))[0].float()
        difference = together[1 + branch[-1]].float() - alone
        errors.append(float(difference.norm() / (alone - alone.mean()).norm()))
    lm.clear()
    return float(torch.tensor(errors).max())  # NaN if any is
