"""Guesses without branches, for models that cannot verify a tree."""

import numpy as np

from specexec.budget import Budget
from specexec.drafters import Drafter
from specexec.tree import TokenTree, best_chain


class ChainDrafter:
    """Another drafter's most probable path."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        return best_chain(self._drafter.propose(context, budget))
