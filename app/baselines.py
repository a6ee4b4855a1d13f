"""The published methods to compare with, over the same draft model; for `bench`, since their texts differ by draft."""

from collections.abc import Callable
from math import isqrt

from specexec.acceptance import AsScored
from specexec.drafters import Drafter, DraftLM
from specexec.drafters.model import ModelDrafter
from specexec.drafters.sampled import SampledDrafter
from specexec.rejection import verify_sampled
from specexec.verify import verify

BASELINES = ("chain", "specinfer", "specexec")

USUAL_NODES = {"chain": 8, "specinfer": 16, "specexec": 64}  # where no budget is given: they do not choose their own


def baseline(name: str, lm: DraftLM | None, nodes: int) -> tuple[Drafter, Callable[..., list[int]]]:
    """The drafter of a published method and how its guesses are verified.

    chain: speculative decoding (arXiv 2211.17192), as long as `nodes`. specinfer: k chains of k sampled tokens
    (arXiv 2305.09781), k the root of `nodes`. specexec: the tree that the draft's own probabilities make best (arXiv
    2406.02532). ValueError where there is no draft model.
    """
    if lm is None:
        raise ValueError(f"{name} needs a draft model: --draft self, ID or a directory")
    if name == "specexec":
        return ModelDrafter(lm, acceptance=AsScored()), verify
    side = isqrt(nodes)
    widths = (1,) * nodes if name == "chain" else (side, *(1,) * (side - 1))
    return SampledDrafter(lm, widths), verify_sampled
