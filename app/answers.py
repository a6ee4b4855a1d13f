"""Answers in OpenAI's shapes: objects, chunks of a stream, usage, timings, logprobs, errors."""

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from app.cancel import Cancelled
from app.host import NotReady
from app.protocol import Refused
from app.stats import Stats
from app.worker import QueueFull, Stopped
from specexec.engine import TokenLogprob

Json = dict[str, Any]


@dataclass(frozen=True)
class Envelope:
    """What all chunks of one answer share. `text_of` gives the text of a token id."""

    model: str
    is_chat: bool
    text_of: Callable[[int], str]
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, text: str, stats: Stats, logprobs: Iterable[TokenLogprob] | None) -> Json:
        """The answer as one object."""
        choice: Json = {"index": 0, "finish_reason": stats.finish_reason, "logprobs": self._logprobs(logprobs)}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return self._object([choice], is_chunk=False) | {"usage": usage(stats), "timings": timings(stats)}

    def role(self) -> Json:
        """The first chunk of a chat's stream."""
        return self._chunk({"role": "assistant", "content": ""}, None, None)

    def delta(self, text: str, logprobs: Iterable[TokenLogprob] | None) -> Json:
        """A chunk with text."""
        return self._chunk({"content": text} if self.is_chat else text, None, logprobs)

    def last(self, stats: Stats) -> Json:
        """The chunk that says why nothing follows, and what the answer cost."""
        return self._chunk({} if self.is_chat else "", stats.finish_reason, None) | {"timings": timings(stats)}

    def final_usage(self, stats: Stats) -> Json:
        """The chunk of `stream_options.include_usage`."""
        return self._object([], is_chunk=True) | {"usage": usage(stats)}

    def _chunk(self, piece: Json | str, finish: str | None, logprobs: Iterable[TokenLogprob] | None) -> Json:
        own = {"delta": piece} if self.is_chat else {"text": piece}
        choice = {"index": 0, **own, "logprobs": self._logprobs(logprobs), "finish_reason": finish}
        return self._object([choice], is_chunk=True)

    def _object(self, choices: list[Json], *, is_chunk: bool) -> Json:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.is_chat else "text_completion"
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.number}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, entries: Iterable[TokenLogprob] | None) -> Json | None:
        if entries is None:
            return None
        entries = list(entries)
        if self.is_chat:
            named = [
                self._named(each.token, each.logprob) | {"top_logprobs": [self._named(*pair) for pair in each.top]}
                for each in entries
            ]
            return {"content": named, "refusal": None}
        return {
            "tokens": [self.text_of(each.token) for each in entries],
            "token_logprobs": [each.logprob for each in entries],
            "top_logprobs": [{self.text_of(token): value for token, value in each.top} for each in entries],
            "text_offset": None,
        }

    def _named(self, token: int, logprob: float) -> Json:
        text = self.text_of(token)
        is_whole = "\ufffd" not in text  # part of a character has no text of its own
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}


def usage(stats: Stats) -> Json:
    """Counts as OpenAI names them."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.tokens,
        "total_tokens": stats.prompt_tokens + stats.tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }


def timings(stats: Stats) -> Json:
    """What the answer cost, in llama.cpp's words and our own."""
    return {
        "prompt_n": stats.prompt_tokens,
        "cached_n": stats.cached_tokens,
        "prompt_ms": 1000 * stats.prefill_s,
        "predicted_n": stats.tokens,
        "predicted_ms": 1000 * (stats.elapsed_s - stats.prefill_s),
        "drafted_n": stats.drafted,
        "accepted_n": stats.accepted,
        "passes": stats.passes,
        "draft_paused": stats.draft_paused,
        "streamed_bytes": stats.streamed_bytes,
    }


def error_of(error: Exception) -> tuple[int, Json]:
    """Status and body for what went wrong."""
    message = " ".join(str(error).split()) or type(error).__name__
    match error:
        case Refused():
            return 400, problem(message, "invalid_request_error", param=error.param)
        case QueueFull():
            return 429, problem(message, "rate_limit_error", code="queue_full")
        case NotReady():
            return 503, problem(message, "server_error", code="not_ready")
        case Stopped():
            return 503, problem(message, "server_error", code="stopped")
        case Cancelled():
            return 499, problem(message, "server_error", code="cancelled")
        case MemoryError() | torch.OutOfMemoryError():
            return 507, problem(f"out of memory: {message}", "server_error", code="out_of_memory")
        case ConnectionError():  # the server behind this one
            return 502, problem(message, "server_error", code="upstream_error")
        case _:
            return 500, problem(f"{type(error).__name__}: {message}", "server_error", code="internal_error")


def problem(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """An error body."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
