"""The command line with passes that stop where a test wants to interrupt: in a prefill, and in mid-answer."""

import itertools
import sys
import time

import app.session
from app.cli import main

PREFILLS = 1, 2  # these passes begin an answer, and say so
HELD = 1, 12  # these wait until nobody wants them any more

_leave_between_layers = app.session.leave_between_layers


def leave_between_held_layers(layers, is_cancelled):
    """The first layer waits, then looks whether it is still wanted."""
    _leave_between_layers(layers, is_cancelled)
    passes = itertools.count(1)

    def hold(*_):
        number = next(passes)
        if number in PREFILLS:
            print("(prefill)", flush=True)
        while number in HELD and not is_cancelled():
            time.sleep(0.01)

    layers[0].register_forward_pre_hook(hold, prepend=True)


app.session.leave_between_layers = leave_between_held_layers
sys.exit(main())
