"""Progress of one phase on standard error: phase, percent, rate, time left.

A terminal sees one line that is rewritten; a pipe sees a plain line every few seconds.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TextIO

from app.sizes import format_size

_TERMINAL_INTERVAL_S = 0.1
_PIPE_INTERVAL_S = 3.0
_POLL_S = 0.1

Listener = Callable[[str, int, int, str], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Tells `listener` phase, units done, units in all and the unit of every Progress that is made inside."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Progress:
    """Shows how far a phase is; call it with units done and in all. `unit`: "B" for bytes, "%" for shares, else a name.

    Nothing is shown for a phase that is over before the first interval has passed.
    """

    def __init__(self, phase: str, unit: str = "B", *, stream: TextIO | None = None) -> None:
        self._phase, self._unit = phase, unit
        self._stream = stream or sys.stderr
        self._rewrites = self._stream.isatty()
        self._interval_s = _TERMINAL_INTERVAL_S if self._rewrites else _PIPE_INTERVAL_S
        self._started = self._shown = time.monotonic()
        self._done = self._total = 0
        self._is_visible = False
        self._listener = _listener.get()

    def __call__(self, done: int, total: int) -> None:
        self._done, self._total = max(self._done, done), total
        self._tell()
        now = time.monotonic()
        if total and now - self._shown >= self._interval_s:
            self._shown = now
            self._show(now)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._total:
            self._done = self._total
            self._tell()
            if self._is_visible:
                self._show(time.monotonic())
        if self._is_visible and self._rewrites:
            print(file=self._stream, flush=True)

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(self._phase, self._done, self._total, self._unit)

    def _show(self, now: float) -> None:
        elapsed = max(now - self._started, 1e-9)
        rate = self._done / elapsed
        amount, speed = f"{self._done} of {self._total} {self._unit}", f"{rate:.1f} {self._unit}/s"
        if self._unit == "B":
            amount, speed = f"{format_size(self._done)} of {format_size(self._total)}", f"{format_size(rate)}/s"
        ending = f"{elapsed:.0f} s"
        if self._done < self._total:
            ending = f"{(self._total - self._done) / rate:.0f} s left" if rate else "time left unknown"
        amounts = [amount, speed] if self._unit != "%" else []
        line = ", ".join([f"{self._phase}: {100 * self._done / self._total:.0f} %", *amounts, ending])
        print(f"\r{line:<79}" if self._rewrites else line, end="" if self._rewrites else "\n", file=self._stream)
        self._stream.flush()
        self._is_visible = True


@contextmanager
def watching(phase: str, count_done: Callable[[], int], total: int, *, unit: str = "B") -> Iterator[None]:
    """Shows the progress of what runs inside by asking `count_done` from a thread of its own."""
    over = threading.Event()
    with Progress(phase, unit) as progress:

        def watch() -> None:
            while not over.wait(_POLL_S):
                progress(min(count_done(), total), total)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        progress(min(count_done(), total), total)
