"""One session, one thread, one bounded queue: answers come in turn, and whoever leaves frees the place."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.cancel import Cancelled
from app.remote import RemoteSession
from app.session import Chunk, Session, begun
from app.template import Message
from specexec.sampling import SamplingParams

MAX_WAITING = 64


class QueueFull(RuntimeError):  # noqa: N818 (read as a sentence: raise QueueFull)
    """As many wait already as may."""


class Stopped(RuntimeError):  # noqa: N818
    """The program is ending, or another model is being loaded."""


@dataclass(frozen=True)
class Request:
    """What is to be answered, and how: token ids, or messages for another server."""

    prompt: Sequence[int] | Sequence[Message]
    params: SamplingParams
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    num_logprobs: int | None = None
    opening: str = ""


Outcome = Chunk | Exception


@dataclass(eq=False)
class Ticket:
    """A place in the queue. `deliver` gets chunks in the worker's thread; last is one that finishes or an error."""

    request: Request
    deliver: Callable[[Outcome], None]
    _given_up: threading.Event = field(default_factory=threading.Event)
    _reason: Exception = field(default_factory=lambda: Cancelled("cancelled"))

    @property
    def is_given_up(self) -> bool:
        return self._given_up.is_set()


class Worker:
    """Answers requests of one session one after another, in a thread of its own that `close` joins."""

    def __init__(self, session: Session | RemoteSession, *, max_waiting: int = MAX_WAITING) -> None:
        self._session, self._max_waiting = session, max_waiting
        self._waiting: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="specexec-worker", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return int(self._running is not None)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request, deliver: Callable[[Outcome], None]) -> Ticket:
        """Takes a place in the queue. Raises QueueFull, Stopped, or ValueError for a prompt that cannot be answered."""
        self._session.require_room(request.prompt)
        ticket = Ticket(request, deliver)
        with self._changed:
            if self._is_closed:
                raise Stopped("the server is stopping")
            if len(self._waiting) >= self._max_waiting:
                raise QueueFull(f"{len(self._waiting)} requests wait already, as many as may: try again later")
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def place(self, ticket: Ticket) -> int:
        """How many are served before `ticket`; 0 once it is its turn or over."""
        with self._changed:
            return self._waiting.index(ticket) + self.num_running if ticket in self._waiting else 0

    def cancel(self, ticket: Ticket, reason: Exception | None = None) -> None:
        """Gives up an answer: one that waits frees its place at once, a running one at its next layer."""
        with self._changed:
            if reason is not None and not ticket.is_given_up:
                ticket._reason = reason
            ticket._given_up.set()
            if ticket not in self._waiting:
                return
            self._waiting.remove(ticket)
        ticket.deliver(ticket._reason)

    def stop(self, reason: str = "the server is stopping") -> None:
        """Takes no more and ends what runs and waits with an error; does not wait for the thread."""
        with self._changed:
            self._is_closed = True
            pending = [*self._waiting, *([self._running] if self._running else [])]
            self._changed.notify_all()
        for ticket in pending:
            self.cancel(ticket, Stopped(reason))

    def close(self) -> None:
        """Stops and joins the thread; may be called again."""
        self.stop()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                ticket = self._running = self._waiting.popleft()
            self._answer(ticket)

    def _answer(self, ticket: Ticket) -> None:
        request = ticket.request
        try:
            chunks = self._session.stream(
                request.prompt,
                request.params,
                max_tokens=request.max_tokens,
                stop=request.stop,
                num_logprobs=request.num_logprobs,
                is_cancelled=ticket._given_up.is_set,
            )
            for chunk in begun(request.opening, chunks):
                if ticket.is_given_up:
                    raise Cancelled
                ticket.deliver(chunk)
        except Cancelled:
            ticket.deliver(ticket._reason)
        except Exception as error:  # whoever asked is told; the worker lives on
            ticket.deliver(error)
