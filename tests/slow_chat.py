"""The command line with layers that take 50 ms each, so that a test can interrupt where it wants to."""

import sys
import time

import app.session
from app.cli import main

_leave_between_layers = app.session.leave_between_layers


def leave_between_slow_layers(layers, is_cancelled):
    """Every layer sleeps, then looks whether it is still wanted."""
    _leave_between_layers(layers, is_cancelled)
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: time.sleep(0.05), prepend=True)


app.session.leave_between_layers = leave_between_slow_layers
sys.exit(main())
