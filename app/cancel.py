"""Leaving a pass between two layers, for an answer that nobody waits for any more."""

from collections.abc import Callable, Iterable

from torch import nn


class Cancelled(Exception):  # noqa: N818 (nothing is wrong)
    """The answer was given up; rows computed before stay good, so the next one is right."""


def leave_between_layers(layers: Iterable[nn.Module], is_cancelled: Callable[[], bool]) -> None:
    """From now on every pass through `layers` raises Cancelled before the first at which `is_cancelled` holds."""

    def check(*_: object) -> None:
        if is_cancelled():
            raise Cancelled

    for layer in layers:
        layer.register_forward_pre_hook(check, prepend=True)  # before it waits for its weights
