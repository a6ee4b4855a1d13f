"""Where trees come from: each module holds one way to guess what the target will say next."""

from typing import Protocol

import numpy as np

from specexec.budget import Budget
from specexec.tree import TokenTree


class Drafter(Protocol):
    """Anything that guesses continuations; the guesses change the speed, never the text."""

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context` (int64 [length]), at most `budget.num_nodes` nodes; the tree may be empty."""
        ...
