"""Where trees come from: each module holds one way to guess what the target will say next."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from specexec.budget import Budget
from specexec.tree import TokenTree


class DraftLM(Protocol):
    """What trees are grown with: a CachedLM, or one behind a window or another vocabulary (see the CachedLM's words).

    layers: the model's, in order of use. num_free: rows left behind what was given last.
    """

    model: PreTrainedModel
    vocab_size: int

    @property
    def layers(self) -> Sequence[nn.Module]: ...

    @property
    def num_free(self) -> int: ...

    def prefill(self, context: np.ndarray) -> torch.Tensor: ...

    def extend(self, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor: ...


class Drafter(Protocol):
    """Anything that guesses continuations; the guesses change the speed, never the text.

    layers: of all networks that it runs, none where it reads text only. A hook of any may raise: the proposal is given
        up, and the next one is as good as if it had never begun.
    """

    @property
    def layers(self) -> Sequence[nn.Module]: ...

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context` (int64 [length]), at most `budget.num_nodes` nodes; the tree may be empty."""
        ...
