"""The command `chat`: a conversation in the terminal, or over a pipe, a line per question."""

import queue
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from app.cancel import Cancelled
from app.conversation import Conversation
from app.environment import is_offline
from app.launch import Running, open_session
from app.progress import watching
from app.reading import lines_of
from app.session import Chunk
from app.settings import READERS, Resolved, flag_name, idle_settings
from app.spelling import nearest
from app.stats import Stats, status_line
from app.template import Message
from app.thinking import ThinkingFilter
from app.worker import Outcome, Request, Worker
from offload.hardware import peak_rss_bytes

_SETTABLE = (
    "temp", "top_p", "top_k", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "max_tokens", "seed", "stop",
)  # fmt: skip
_HELP = '''\
/set NAME VALUE   change a sampling setting; /set shows them
/system TEXT      say who the model is; /system removes that
/retry            answer the last question again
/clear            begin anew
/save FILE        keep the conversation as JSON
/load FILE        go on with one that was kept
/stats            what the last answer cost
/bye              leave (so does Ctrl-D)
Ctrl-C stops an answer. """ begins and ends a question of several lines.'''


class Leave(Exception):  # noqa: N818 (nothing is wrong)
    """The user wants to go."""


def talk(chosen: Resolved, *, hides_thinking: bool, offline: bool) -> int:
    """Talks until the user leaves or the input ends; an interrupt while loading is the caller's to report."""
    with (
        open_session(chosen, offline=offline or is_offline(), note=_note) as running,
        closing(Worker(running.session)) as worker,
    ):
        chat = Chat(running, worker, hides_thinking=hides_thinking)
        if sys.stdin.isatty():
            _note("Ask something; /help tells what else can be typed.")
        try:
            for line in lines_of(chat.toolbar):
                chat.take(line)
        except Leave:
            pass
    return 0


class Chat:
    """A conversation with a running session. What `take` is given is a command or a question."""

    def __init__(self, running: Running, worker: Worker, *, hides_thinking: bool) -> None:
        self._running, self._worker, self._hides_thinking = running, worker, hides_thinking
        self._settings = running.chosen.settings
        self._has_seed = "seed" in running.chosen.origins
        self._conversation = Conversation(self._settings.system)
        self._stats: Stats | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda text: print(_HELP),
            "/bye": self._leave,
            "/clear": self._clear,
            "/system": self._set_system,
            "/set": self._set,
            "/stats": self._show_stats,
            "/retry": self._retry,
            "/save": self._save,
            "/load": self._load,
        }

    def toolbar(self) -> str:
        """How full the context is, and how fast the last answer was."""
        stats, ctx = self._stats or Stats(prompt_tokens=0), self._running.session.ctx
        parts = [f"context {stats.prompt_tokens + stats.tokens}" + (f" of {ctx}" if ctx else "")]
        if stats.tokens:
            parts.append(f"{stats.tokens_per_s:.1f} tokens/s")
        if stats.passes:
            parts.append(f"{stats.tokens_per_pass:.1f} tokens/pass")
        return " | ".join(parts)

    def take(self, text: str) -> None:
        """Does what a line asks for; errors are told and forgotten."""
        try:
            if not text.startswith("/"):
                if text.strip():
                    self._ask(text)
                return
            name, _, rest = text.partition(" ")
            if name not in self._commands:
                raise ValueError(f"no command {name}{nearest(name, self._commands)}")
            self._commands[name](rest.strip())
        except (ValueError, OSError, MemoryError, FloatingPointError) as error:
            _note(f"specexec: {' '.join(str(error).split())}")

    def _ask(self, text: str) -> None:
        self._conversation.ask(text)
        try:
            prompt = self._running.session.encode_chat(self._conversation.messages)
            self._running.session.require_room(prompt)
            answer = self._answer(prompt)
        except Exception:
            self._conversation.take_back()  # as if it had not been asked
            raise
        self._conversation.answer(answer)

    def _answer(self, prompt: Sequence[int] | Sequence[Message]) -> str:
        """Shows the answer as it comes; Ctrl-C ends it, and what has come so far counts."""
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        seed = self._settings.seed if self._has_seed else random.getrandbits(63)
        chosen = replace(self._running.chosen, settings=replace(self._settings, seed=seed))
        params = replace(self._running, chosen=chosen).sampling
        opening = self._running.session.opening(prompt)
        ticket = self._worker.submit(
            Request(prompt, params, self._settings.max_tokens, self._settings.stop, opening=opening), outcomes.put
        )
        pieces: list[str] = []
        shown = ThinkingFilter() if self._hides_thinking else None
        try:
            for chunk in self._chunks(outcomes):
                pieces.append(chunk.text)
                self._stats = stats = chunk.stats
                print(shown.push(chunk.text) if shown else chunk.text, end="", flush=True)
            print(shown.flush() if shown else "", flush=True)
            _note(self._status(stats))
        except KeyboardInterrupt:
            self._worker.cancel(ticket)
            _drain(outcomes)
            print(flush=True)
            if not sys.stdin.isatty():
                raise
            _note("(stopped)")
        return "".join(pieces)

    def _chunks(self, outcomes: "queue.SimpleQueue[Outcome]") -> Iterator[Chunk]:
        streamed_before = self._running.count_streamed()
        with watching(
            "prefill",
            lambda: self._running.count_streamed() - streamed_before,
            self._running.pass_bytes,
        ):
            outcome = outcomes.get()
        while True:
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
            if outcome.stats.finish_reason:
                return
            outcome = outcomes.get()

    def _status(self, stats: Stats) -> str:
        return status_line(stats, self._running.raw_link_bps, peak_rss_bytes(), self._running.limit_bytes)

    def _leave(self, text: str) -> None:
        raise Leave

    def _clear(self, text: str) -> None:
        self._conversation = Conversation(self._conversation.system)
        self._stats = None

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None

    def _set(self, text: str) -> None:
        name, *value = re.split(r" *= *| +", text, maxsplit=1)  # what follows may have either in it
        name = name.replace("-", "_")
        if not name:
            print("\n".join(f"{each} {getattr(self._settings, each)}" for each in _SETTABLE))
            return
        if name not in _SETTABLE:
            raise ValueError(f"no setting {name!r} to change here{nearest(name, _SETTABLE)}")
        try:
            self._settings = replace(self._settings, **{name: READERS[name]("".join(value).strip())})
        except ValueError as error:
            raise ValueError(f"{flag_name(name).lstrip('-')} must be {error}") from None
        self._has_seed |= name == "seed"
        for line in idle_settings(Resolved(self._settings, {name: "/set"})):
            _note(line)

    def _show_stats(self, text: str) -> None:
        if self._stats is None:
            raise ValueError("nothing has been answered yet")
        stats = self._stats
        print(f"prompt {stats.prompt_tokens} tokens, {stats.cached_tokens} of them computed before")
        if stats.passes:
            print(f"drafted {stats.drafted}, accepted {stats.accepted}, {stats.passes} passes")
        print(self._status(stats))

    def _retry(self, text: str) -> None:
        if (question := self._conversation.take_back()) is None:
            raise ValueError("nothing has been asked yet")
        self._ask(question)

    def _save(self, text: str) -> None:
        self._conversation.save(_file(text))
        _note(f"saved to {text}")

    def _load(self, text: str) -> None:
        self._conversation = Conversation.load(_file(text))
        _note(f"{len(self._conversation.turns)} messages from {text}")


def _file(text: str) -> Path:
    if not text:
        raise ValueError("name a file")
    return Path(text).expanduser()


def _drain(outcomes: "queue.SimpleQueue[Outcome]") -> None:
    """Waits until the worker has let go of the answer; another Ctrl-C meanwhile changes nothing."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            outcome = outcomes.get(timeout=1)
        except (queue.Empty, KeyboardInterrupt):
            continue
        if isinstance(outcome, Cancelled) or (isinstance(outcome, Chunk) and outcome.stats.finish_reason):
            return


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
