"""Leaving a pass between two layers, for an answer that nobody waits for any more."""

from collections.abc import Callable

from offload.load import decoder_layers
from specexec.lm import CachedLM


class Cancelled(Exception):  # noqa: N818 (nothing is wrong)
    """The answer was given up; rows computed before stay good, so the next one is right."""


def leave_between_layers(lm: CachedLM, is_cancelled: Callable[[], bool]) -> None:
    """From now on every pass of `lm` raises Cancelled before the first layer at which `is_cancelled` holds."""

    def check(*_: object) -> None:
        if is_cancelled():
            raise Cancelled

    _, layers = decoder_layers(lm.model)
    for layer in layers:
        layer.register_forward_pre_hook(check, prepend=True)  # before it waits for its weights
