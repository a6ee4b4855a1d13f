"""A draft model with another tokenizer: both vocabularies' common tokens carry the guesses across."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from specexec.device import compute_device
from specexec.drafters import DraftLM
from specexec.lm import as_ids

_SPACES = {"▁": "Ġ"}  # sentencepiece's and byte-level BPE's marks of a leading space


class TranslatedLM:
    """A draft model that reads and scores the target's token ids, so that ModelDrafter can grow trees with it.

    to_draft: int64 [V of the target], the draft's id of the same token or -1 (see common_tokens). A token that only the
        target has is never guessed.
    retokenize: the draft's ids of a text given as the target's ids.
    """

    def __init__(self, lm: DraftLM, to_draft: np.ndarray, retokenize: Callable[[np.ndarray], np.ndarray]) -> None:
        self._lm, self._to_draft, self._retokenize = lm, to_draft, retokenize
        self.model, self.layers, self.vocab_size = lm.model, lm.layers, len(to_draft)
        device = compute_device(lm.model)
        self._common = torch.from_numpy(np.flatnonzero(to_draft >= 0)).to(device)
        self._columns = torch.from_numpy(to_draft).to(device)[self._common]

    @property
    def num_free(self) -> int:
        return self._lm.num_free

    def prefill(self, context: np.ndarray) -> torch.Tensor:
        """Logits [1, V of the target] of what follows `context`."""
        return self._translate(self._lm.prefill(as_ids(self._retokenize(context))))

    def extend(self, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        """As CachedLM.extend, in the target's ids."""
        return self._translate(self._lm.extend(self._to_draft[tokens], parents))

    def _translate(self, logits: torch.Tensor) -> torch.Tensor:
        result = logits.new_full((len(logits), len(self._to_draft)), torch.finfo(logits.dtype).min)
        result[:, self._common] = logits[:, self._columns]
        return result


def common_tokens(target: Mapping[str, int], draft: Mapping[str, int], num_target: int) -> np.ndarray:
    """For every target id the draft's id of the same token, or -1: int64 [num_target]. ValueError if none is common."""
    theirs = {_plain(token): number for token, number in draft.items()}
    to_draft = np.full(num_target, -1)
    for token, number in target.items():
        if number < num_target:
            to_draft[number] = theirs.get(_plain(token), -1)
    if (to_draft < 0).all():
        raise ValueError("the draft's vocabulary has no token in common with the target's: take another draft")
    return to_draft


def _plain(token: str) -> str:
    return _SPACES.get(token[:1], token[:1]) + token[1:]
