"""The one model that a server has loaded: loads it in the background, says how far that is, passes requests on."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from app.cancel import Cancelled
from app.launch import Running, open_session
from app.metrics import Metrics
from app.progress import told
from app.settings import Resolved
from app.sizes import format_size
from app.worker import MAX_WAITING, Outcome, Request, Ticket, Worker

_PATIENCE_S = 10.0


@dataclass(frozen=True)
class State:
    """idle, loading, ready or failed; of a load also what it is doing and how far that is, of a failure why."""

    kind: Literal["idle", "loading", "ready", "failed"]
    detail: str = ""
    done: int = 0
    total: int = 0
    unit: str = "B"
    elapsed_s: float = 0.0

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 0.0

    @property
    def left_s(self) -> float | None:
        return self.elapsed_s * (1 - self.share) / self.share if self.share else None

    def __str__(self) -> str:
        if self.kind != "loading" or not self.total:
            return self.detail or self.kind
        rate = f", {format_size(self.done / self.elapsed_s)}/s" if self.unit == "B" and self.elapsed_s else ""
        left = f", {self.left_s:.0f} s left" if self.left_s is not None else ""
        return f"{self.detail}: {100 * self.share:.0f} %{rate}{left}"


class NotReady(RuntimeError):  # noqa: N818 (read as a sentence: raise NotReady)
    """No model is loaded (yet)."""


class Host:
    """Holds at most one open session and its worker; `load` replaces them."""

    def __init__(self, *, offline: bool, note: Callable[[str], None], max_waiting: int = MAX_WAITING) -> None:
        self.offline, self._note, self._max_waiting = offline, note, max_waiting
        self._opened = ExitStack()
        self._loader: threading.Thread | None = None
        self._is_closed = False
        self.state = State("idle")
        self.running: Running | None = None
        self.worker: Worker | None = None
        self.metrics = Metrics(
            lambda: self.worker.num_running if self.worker else 0,
            lambda: self.worker.num_waiting if self.worker else 0,
            self._resident_share,
        )

    def load(self, chosen: Resolved, on_failure: Callable[[Exception], None] = lambda error: None) -> None:
        """Begins to load what the settings ask for in place of what is loaded; `state` tells the rest.

        Answers that run or wait for the model before end with an error. ValueError while another load goes on.
        """
        if self.state.kind == "loading":
            raise ValueError("a model is being loaded already: wait until it is there")
        self.state = State("loading", "looking for the model")
        self._loader = threading.Thread(target=self._load, args=(chosen, on_failure), name="specexec-load", daemon=True)
        self._loader.start()

    def submit(self, request: Request, deliver: Callable[[Outcome], None]) -> Ticket:
        """See Worker.submit; NotReady where there is none."""
        if (worker := self.worker) is None:  # looked up once: a load takes it away at any time
            raise NotReady(f"no model is ready to answer: {self.state}")
        return worker.submit(request, self.metrics.observed(deliver))

    def cancel(self, ticket: Ticket) -> None:
        """Gives up an answer; without effect once it is over."""
        if (worker := self.worker) is not None:
            worker.cancel(ticket)

    def place(self, ticket: Ticket) -> int:
        """How many are served before `ticket`."""
        return worker.place(ticket) if (worker := self.worker) else 0

    def stop(self) -> None:
        """Ends answers and loads with an error, without waiting for them."""
        self._is_closed = True
        if self.worker is not None:
            self.worker.stop()

    def close(self) -> None:
        """Stops, and closes the model; may be called again."""
        self.stop()
        if self._loader is not None:
            self._loader.join(_PATIENCE_S)
        self._unload()

    def _unload(self) -> None:
        if self.worker is not None:
            self.worker.stop("another model is being loaded" if not self._is_closed else "the server is stopping")
        self.worker = self.running = None
        self._opened.close()

    def _load(self, chosen: Resolved, on_failure: Callable[[Exception], None]) -> None:
        phase, began = "", time.monotonic()

        def listen(new_phase: str, done: int, total: int, unit: str) -> None:
            nonlocal phase, began
            if self._is_closed and threading.current_thread() is self._loader:
                raise Cancelled("the server is stopping")
            if new_phase != phase:
                phase, began = new_phase, time.monotonic()
            self.state = State("loading", phase, done, total, unit, time.monotonic() - began)

        try:
            self._unload()
            with told(listen), ExitStack() as opened:
                running = opened.enter_context(open_session(chosen, offline=self.offline, note=self._note))
                worker = Worker(running.session, max_waiting=self._max_waiting)
                opened.callback(worker.close)
                self._opened = opened.pop_all()
        except Exception as error:  # shown to whoever asked for the model
            self.state = State("failed", " ".join(str(error).split()) or type(error).__name__)
            on_failure(error)
            return
        self.running, self.worker, self.state = running, worker, State("ready")

    def _resident_share(self) -> float:
        if self.running is None or (plan := self.running.plan) is None:
            return 0.0
        return len(plan.resident) / (len(plan.resident) + len(plan.streamed))
