"""What a draft's scores are worth: the probability that the target will agree, learned as the text goes on."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

NUM_CHILDREN = 64  # of one node, the draft's most probable: beyond them hardly anything is accepted

_SHARPNESSES = np.geomspace(0.2, 3.2, 33)
_PRIOR_SHARPNESS = 0.5  # of a 4-bit copy under greedy decoding; fitted on 24 prompts of this project's own
_PRIOR_COUNT = 24.0  # observations that the priors weigh as much as
_CURVATURE = 0.25  # log-likelihood lost per observation and squared log-distance from the best sharpness, as fitted
_PRIOR_REACH = 0.99
_MEMORY = 0.998  # an observation counts half after some 350 others


class Acceptance:
    """P(child accepted | parent accepted) = reach x softmax(logits / sharpness) over a node's NUM_CHILDREN best.

    A draft's probability of a token is not that of its acceptance: a greedy target takes its argmax, so a good draft's
    scores have to be sharpened; a bad draft's have to be flattened. A sampling target takes the argmax too, of logits
    with noise, which the draft's have been given as well (`is_coupled`). `sharpness` is the most likely one of a grid
    given where the target's tokens were among the draft's, `reach` how often they were there at all. Both are kept for
    every sampling temperature. More freedom does not pay: bins over probability and rank predict held-out acceptance no
    better than this one softmax (0.444 and 0.430 nats a token), and over depth it does not change.
    """

    is_coupled: ClassVar[bool] = True  # logits come with the noise of the target's draw (specexec.drafters.coupling)

    def __init__(self) -> None:
        self._evidence: dict[str, np.ndarray] = {}  # by temperature: log-likelihood of each sharpness
        self._counts: dict[str, np.ndarray] = {}  # by temperature: [among the children, all]
        self._slots: dict[str, Acceptance] = {}

    def logprobs(self, logits: np.ndarray, temperature: float) -> np.ndarray:
        """Log-probabilities [n, m] that children with the draft's `logits` [n, m] are accepted."""
        key = self._key(temperature)
        sharpness = _SHARPNESSES[int(self._evidence[key].argmax())]
        return (_log_softmax(logits / sharpness) + np.log(self.chance(temperature))).astype(np.float32)

    def chance(self, temperature: float) -> float:
        """How often the target's token was among the children."""
        inside, total = self._counts[self._key(temperature)]
        return float(inside / total)

    def observe(self, logits: np.ndarray, index: int | None, temperature: float) -> None:
        """Learn that the target's token was child `index` of a node whose children have `logits` [m], or none."""
        key = self._key(temperature)
        self._counts[key] = self._counts[key] * _MEMORY + (index is not None, 1.0)
        if index is not None:
            likelihoods = _log_softmax(logits[None, :] / _SHARPNESSES[:, None])[:, index]
            self._evidence[key] = self._evidence[key] * _MEMORY + likelihoods

    def slot(self, number: int) -> "Acceptance":
        """A record of its own for the guesses at one place of a block: further ahead they are worth less."""
        return self._slots.setdefault(str(number), Acceptance())

    def to_data(self) -> dict[str, Any]:
        """What has been learned, as JSON's own types."""
        data = {
            key: {"evidence": self._evidence[key].tolist(), "counts": self._counts[key].tolist()}
            for key in self._counts
        }
        slots = {number: learned for number, slot in self._slots.items() if (learned := slot.to_data())}
        return {**data, "slots": slots} if slots else data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Acceptance":
        """The reverse of `to_data`. ValueError if the data is of another form."""
        acceptance = cls()
        if not isinstance(data, Mapping):
            raise ValueError("not an acceptance record")
        slots = data.get("slots", {})
        if not isinstance(slots, Mapping):
            raise ValueError("not an acceptance record")
        acceptance._slots = {number: cls.from_data(learned) for number, learned in slots.items()}
        for key, learned in data.items():
            if key == "slots":
                continue
            try:
                float(key)
                evidence, counts = np.array(learned["evidence"], float), np.array(learned["counts"], float)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError("not an acceptance record") from error
            if evidence.shape != _SHARPNESSES.shape or counts.shape != (2,) or not 0 < counts[0] <= counts[1]:
                raise ValueError("not an acceptance record")
            acceptance._evidence[key], acceptance._counts[key] = evidence, counts
        return acceptance

    def _key(self, temperature: float) -> str:
        key = f"{temperature:.2f}"
        if key not in self._counts:
            self._evidence[key] = -_PRIOR_COUNT * _CURVATURE * np.log(_SHARPNESSES / _PRIOR_SHARPNESS) ** 2
            self._counts[key] = np.array([_PRIOR_REACH, 1.0]) * _PRIOR_COUNT
        return key


class AsScored:
    """Takes a draft's probability of a token for that of its acceptance, as published methods do, and never learns."""

    is_coupled: ClassVar[bool] = False  # the draft's distribution, whatever the target draws

    def logprobs(self, logits: np.ndarray, temperature: float) -> np.ndarray:
        """As Acceptance.logprobs."""
        return _log_softmax(logits / (temperature or 1.0)).astype(np.float32)

    def observe(self, logits: np.ndarray, index: int | None, temperature: float) -> None:
        """As Acceptance.observe."""


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
