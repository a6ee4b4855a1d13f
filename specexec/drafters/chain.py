"""Guesses without branches, for models that cannot verify a tree."""

from collections.abc import Sequence

import numpy as np
from torch import nn

from specexec.budget import Budget
from specexec.drafters import Drafter
from specexec.tree import TokenTree, best_chain


class ChainDrafter:
    """Another drafter's most probable path."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The other's; see Drafter."""
        return self._drafter.layers

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        """Guess what follows `context`; see Drafter."""
        return best_chain(self._drafter.propose(context, budget))
