"""Whether a draft's token ids mean what the target's mean, and how guesses cross over where they do not."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from specexec.drafters.translate import common_tokens
from specexec.lm import as_ids

_ENOUGH = 0.5  # of the smaller vocabulary: with less in common hardly a sentence can be guessed


@dataclass(frozen=True, eq=False)
class Translation:
    """What TranslatedLM needs: the draft's id of every target id (or -1), and the draft's ids of the target's text."""

    to_draft: np.ndarray
    retokenize: Callable[[np.ndarray], np.ndarray]

    @property
    def num_common(self) -> int:
        return int((self.to_draft >= 0).sum())


def translation(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, num_draft: int) -> Translation | None:
    """How the draft's tokens become the target's; None where their ids are the same already.

    num_draft: ids that the draft model knows. Raises ValueError that names the first id that differs if too few tokens
    are common.
    """
    difference = _first_difference(target, draft)
    if difference is None:
        return None
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if target.eos_token and draft.eos_token:
        theirs = {**theirs, target.eos_token: draft.eos_token_id}  # whatever it is called, it ends a text
    known = {token: number for token, number in theirs.items() if number < num_draft}
    try:
        to_draft = common_tokens(ours, known, max(ours.values()) + 1)
    except ValueError as error:
        raise ValueError(difference) from error
    found = Translation(to_draft, _retokenizer(target, draft))
    if found.num_common < _ENOUGH * min(len(ours), len(known)):
        raise ValueError(difference)
    return found


def _first_difference(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """What is wrong with the first id that stands for different tokens; ids that only one of them has do no harm."""
    ours, theirs = _by_id(target), _by_id(draft)
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            return (
                f"the draft's tokenizer differs from the target's: id {number} is {theirs[number]!r} in the draft and "
                f"{ours[number]!r} in the target, and too few tokens are common to both; take a draft of the same "
                "family, or --draft self or ngram"
            )
    return None


def _retokenizer(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> Callable[[np.ndarray], np.ndarray]:
    bos, begins = target.bos_token or "", draft("")["input_ids"][:1]  # what it puts before any text
    own_bos = [] if draft.bos_token_id is None else [draft.bos_token_id]

    def retokenize(context: np.ndarray) -> np.ndarray:
        text = target.decode(context.tolist(), clean_up_tokenization_spaces=False)
        has_bos = begins == own_bos or (bool(bos) and text.startswith(bos))
        ids = draft(text.removeprefix(bos), add_special_tokens=False, verbose=False)["input_ids"]
        return as_ids([*(own_bos if has_bos else []), *ids] or [draft.eos_token_id or 0])

    return retokenize


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}
