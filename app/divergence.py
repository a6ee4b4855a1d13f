"""Whether an answer is what the target alone says, and where not, how near a tie the two tokens are."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.session import Session
from specexec.engine import generate
from specexec.sampling import SamplingParams, make_sampler

_NUM_ALTERNATIVES = 64


@dataclass(frozen=True)
class Divergence:
    """The first token, counted from 0, that differs: `said` was emitted, `plain` is what the target says alone.

    gap: how far the logit of `plain` is above that of `said`, or None where `said` is none of its near rivals.
    """

    at: int
    said: int
    plain: int
    gap: float | None


def first_divergence(
    session: Session, prompt: Sequence[int], params: SamplingParams, tokens: Sequence[int]
) -> Divergence | None:
    """Decode `prompt` again without a draft, with the same seed, and compare with `tokens`; None if all are the same.

    Takes a pass of the target for each token. In float32 it finds nothing; in 16 bits, a pass over many tokens rounds
    otherwise than a pass over one, which decides near-ties.
    """
    sampler = make_sampler(params, session.stop_ids, len(prompt))
    steps = generate(
        session.target,
        None,
        prompt,
        sampler,
        budget=0,
        max_tokens=len(tokens),
        stop=session.stop_ids,
        num_logprobs=_NUM_ALTERNATIVES,
    )
    for at, (said, step) in enumerate(zip(tokens, steps, strict=False)):
        if step.tokens[0] != said:
            own = step.logprobs[0]
            rivals = dict(own.top)
            return Divergence(at, said, own.token, own.logprob - rivals[said] if said in rivals else None)
    return None


def in_words(found: Divergence | None, session: Session, num_tokens: int) -> str:
    """One line on the outcome of the check."""
    if found is None:
        return f"check: all {num_tokens} tokens are those of plain decoding"
    gap = "far apart" if found.gap is None else f"{found.gap:.4f} apart"
    return (
        f"check: token {found.at + 1} is {session.text_of(found.said)!r}, plain decoding says"
        f" {session.text_of(found.plain)!r}; their logits are {gap} (16-bit passes round by their size and decide"
        " near-ties so; --dtype float32 has none)"
    )
