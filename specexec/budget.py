"""What a proposal may spend, and under which sampling its guesses will be judged."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The room that one proposal has.

    num_nodes: the most nodes that the target will score in its pass (the root not counted).
    max_depth: the longest path that can still be emitted; deeper nodes would be wasted.
    temperature: the target's sampling temperature, 0 for greedy: a draft's probabilities are estimates of acceptance
        only after they have been brought to the same temperature.
    """

    num_nodes: int
    max_depth: int
    temperature: float = 0.0
