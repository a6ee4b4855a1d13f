"""From logits to one token: the library's logits processors, then the largest sum of log-score and noise.

With Gumbel noise, independent for every token of the vocabulary, that is a draw from the softmax (the Gumbel-max rule).
The noise of an answer's k-th token follows from the seed and k alone. So a draft can be shown the noise that the target
will draw with: where their distributions are alike they choose alike, and the text is the same with any draft
(drafter-invariant speculative decoding: Daliri et al. 2024, arXiv 2408.07978).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

_KEPT = 32  # tokens whose noise is kept: a tree's depth, which the draft asks for before the target draws
_LEAST = np.finfo(np.float64).tiny  # so that no noise is infinite


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Temperature 0 is greedy; 0 for top_k and 1 for top_p mean no filter.

    Between 0 and 1e-6 there is no temperature, and no repetition_penalty beyond 1e-6 to 1e6: logits that it divides or
    multiplies might be infinite, and all of those alike.

    repetition_penalty divides (multiplies, where negative) the logits of every token of prompt and answer; presence and
    frequency penalties are subtracted once, or once per occurrence, for tokens of the answer only.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or value != value or abs(value) == float("inf"):
                raise ValueError(f"{field.name} must be a finite number, not {value!r}")
        checks = {
            "temperature": (self.temperature == 0 or self.temperature >= 1e-6, "0 (greedy) or at least 1e-6"),
            "top_k": (self.top_k >= 0, "at least 0 (0 switches it off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (1e-6 <= self.repetition_penalty <= 1e6, "from 1e-6 to 1e6 (1 switches it off)"),
            "presence_penalty": (abs(self.presence_penalty) <= 2, "from -2 to 2"),
            "frequency_penalty": (abs(self.frequency_penalty) <= 2, "from -2 to 2"),
            "min_tokens": (self.min_tokens >= 0, "at least 0"),
            "seed": (0 <= self.seed < 2**63, "from 0 to 2^63 - 1"),
        }
        for name, (valid, allowed) in checks.items():
            if not valid:
                raise ValueError(f"{name} must be {allowed}, not {getattr(self, name)}")


class OccurrencePenalty(LogitsProcessor):
    """OpenAI's presence and frequency penalties over the answer: the tokens behind the prompt."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[-1])[: scores.shape[-1]]
        return scores - self._presence * (counts > 0) - self._frequency * counts


class Sampler:
    """Draws the tokens of one answer, each given the path to it and the target's logits there.

    Drawing leaves no trace: the same path and logits give the same token again. Only `uniform` and `pick`, for the
    baselines that need more than one number a token (specexec.rejection), move on a random state.
    """

    def __init__(
        self,
        params: SamplingParams,
        processors: LogitsProcessorList,
        warpers: LogitsProcessorList,
        *,
        prompt_length: int,
    ) -> None:
        self.params = params
        self._processors, self._warpers, self._prompt_length = processors, warpers, prompt_length
        self._noise: dict[int, np.ndarray] = {}  # by number of the token in the answer; the last few
        self._generator = torch.Generator().manual_seed(params.seed)

    def scores(self, logits: torch.Tensor, path: np.ndarray) -> torch.Tensor:
        """Log-scores [V] (float32, unnormalised) after penalties and filters; `path` is prompt plus answer so far."""
        scores = logits.float()[None]
        if self._processors or self._warpers:
            ids = torch.from_numpy(path)[None].to(logits.device)
            scores = self._warpers(ids, self._processors(ids, scores))
        return scores[0]

    def __call__(self, logits: torch.Tensor, path: np.ndarray) -> int:
        """The next token after `path`, given the target's `logits` [V] there. Raises FloatingPointError on NaN."""
        scores = self.scores(logits, path)
        if self.params.temperature:
            scores = scores.double() + torch.from_numpy(self.noise(len(path), len(scores))).to(scores.device)
        best = int(scores.argmax())
        if scores[best].isnan():  # argmax finds a NaN if there is one
            raise FloatingPointError("the target's logits are not numbers; try --dtype float32")
        return best

    def noise(self, length: int, size: int) -> np.ndarray:
        """What is added to the log-scores of the token behind a path of `length` tokens: float64 [size].

        Standard Gumbel. It is kept: not to be changed. That of a smaller vocabulary is the beginning of a larger one's.
        """
        number = length - self._prompt_length
        noise = self._noise.get(number)
        if noise is None or len(noise) < size:
            # The number in the counter's highest word: every token has a stream of its own.
            random = np.random.Generator(np.random.Philox(key=self.params.seed, counter=[0, 0, 0, number]))
            noise = -np.log(np.maximum(random.standard_exponential(size), _LEAST))
            if len(self._noise) >= _KEPT:
                del self._noise[min(self._noise)]  # the text only goes forward
            self._noise[number] = noise
        return noise[:size]

    def probs(self, logits: torch.Tensor, path: np.ndarray) -> torch.Tensor:
        """The distribution (float64 [V]) that tokens after `path` are drawn from; all on one token if greedy."""
        scores = self.scores(logits, path)
        if self.params.temperature == 0:
            return torch.zeros_like(scores, dtype=torch.float64).index_fill_(0, scores.argmax(), 1.0)
        return scores.softmax(-1, dtype=torch.float64)

    def pick(self, probs: torch.Tensor) -> int:
        """A token drawn by inverse transform, with the next uniform number."""
        cumulative = probs.cumsum(-1)
        return min(int(torch.searchsorted(cumulative, self.uniform() * cumulative[-1], right=True)), len(probs) - 1)

    def uniform(self) -> float:
        """The next random number of those beside the noise, at least 0 and below 1."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def make_sampler(params: SamplingParams, eos_ids: Iterable[int], prompt_length: int) -> Sampler:
    """The sampler of one answer. Order as in transformers: penalties, then temperature, top-k, top-p, min-p."""
    eos = sorted(eos_ids)
    processors, warpers = LogitsProcessorList(), LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(OccurrencePenalty(params.presence_penalty, params.frequency_penalty, prompt_length))
    if params.min_tokens and eos:
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, eos))
    if params.temperature:
        if params.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            warpers.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            warpers.append(MinPLogitsWarper(params.min_p))
    return Sampler(params, processors, warpers, prompt_length=prompt_length)
