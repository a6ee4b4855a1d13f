"""Chats answered by another OpenAI-compatible server, with the face of a session: how it does so is not known here."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from app.cancel import Cancelled
from app.protocol import Refused
from app.session import Chunk
from app.stats import Stats
from app.template import Message
from specexec.sampling import SamplingParams

_POLL_S = 0.1
_HERE = ("127.0.0.1", "localhost", "::1")  # where no proxy is asked
_TIMEOUT = httpx.Timeout(10.0, read=None)  # a prompt may take its time, a connection may not
_REFUSED = (401, 403)
_NEUTRAL: dict[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}


class RemoteSession:
    """Answers by `model` at `url`. A prompt is the messages themselves; `ctx` is None where the server does not tell.

    Errors are ConnectionErrors and ValueErrors of one line that name the server.
    """

    def __init__(self, url: str, model: str, ctx: int | None, key: str | None) -> None:
        self.model, self.ctx = model, ctx
        self._url, self._key = url, key

    @property
    def vocab_size(self) -> int:
        """ValueError: ids mean nothing to another server."""
        raise ValueError("only chats are passed on to another server, no prompts without messages")

    def encode_chat(self, messages: Sequence[Message]) -> list[Message]:
        """The messages: the server has the template."""
        return list(messages)

    def opening(self, prompt: Sequence[Message]) -> str:
        """Nothing: it is the server that knows how its template ends."""
        return ""

    def encode_raw(self, text: str) -> list[Message]:
        """ValueError: see `vocab_size`."""
        raise ValueError("only chats are passed on to another server, no prompts without messages")

    def require_room(self, prompt: Sequence[Message]) -> None:
        """ValueError for no messages at all; what is too long only the server knows."""
        if not prompt:
            raise ValueError("the prompt is empty")

    def text_of(self, token: int) -> str:
        """ValueError: see `vocab_size`."""
        raise ValueError("the tokens of another server are not known here")

    def stream(
        self,
        prompt: Sequence[Message],
        params: SamplingParams,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        num_logprobs: int | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Chunk]:
        """Answers `prompt`, a chunk as it comes; once `is_cancelled` holds, hangs up and raises Cancelled."""
        if num_logprobs is not None:
            raise Refused("logprobs are not passed on from another server", "logprobs")
        body = {"model": self.model, "messages": list(prompt), **_asked(params, max_tokens, stop)}
        answer = _Answer()
        with asyncio.Runner() as runner:
            events = _events(self._url, self._key, body)
            try:
                while (event := runner.run(_next(events, is_cancelled))) is not None:
                    if (text := answer.take(event)) is not None:
                        yield Chunk(text, answer.stats, None)
            finally:
                runner.run(events.aclose())
        if answer.finish_reason is None:
            raise ConnectionError(f"{self._url} broke off before the answer was over")
        yield Chunk(answer.flush(), replace(answer.stats, finish_reason=answer.finish_reason), None)


class _Answer:
    """What the events of one answer add up to; thoughts that come apart are put between <think> marks."""

    def __init__(self) -> None:
        self.stats = Stats(prompt_tokens=0)
        self.finish_reason: str | None = None
        self._started = time.perf_counter()
        self._is_thinking = False

    def take(self, event: Mapping[str, Any]) -> str | None:
        """The text of an event, None where it has none."""
        if usage := event.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self.stats = replace(
                self.stats,
                prompt_tokens=usage.get("prompt_tokens", 0),
                tokens=usage.get("completion_tokens", self.stats.tokens),
                cached_tokens=cached,
            )
        for choice in event.get("choices") or ():
            if reason := choice.get("finish_reason"):
                self.finish_reason = "length" if reason == "length" else "stop"
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text := self._marked(thought, delta.get("content") or ""):
                elapsed_s = time.perf_counter() - self._started
                stats = self.stats  # until the server counts for itself, a piece is taken for a token
                first_s = stats.prefill_s or elapsed_s
                self.stats = replace(stats, tokens=stats.tokens + 1, prefill_s=first_s, elapsed_s=elapsed_s)
                return text
        return None

    def flush(self) -> str:
        """What is left to say at the end."""
        return "</think>" if self._is_thinking else ""

    def _marked(self, thought: str, text: str) -> str:
        marked = ""
        if thought:
            marked = thought if self._is_thinking else f"<think>{thought}"
            self._is_thinking = True
        if text and self._is_thinking:
            self._is_thinking = False
            return f"{marked}</think>\n\n{text}"
        return marked + text


def connect(url: str, model: str | None, key: str | None) -> RemoteSession:
    """Asks the server what it serves; `model` None takes the only one. ConnectionError or ValueError in one line."""
    response = asyncio.run(_get(f"{url}/models", key))
    try:
        entries = {str(entry["id"]): entry for entry in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        raise ConnectionError(f"{url} is not an OpenAI-compatible server: {url}/models is no list of models") from None
    if model is None:
        if len(entries) != 1:
            raise ValueError(f"{url} serves {', '.join(entries) or 'no model'}: name one with --target")
        (model,) = entries
    entry = entries.get(model, {})
    return RemoteSession(url, model, entry.get("max_model_len") or entry.get("context_length"), key)


def _asked(params: SamplingParams, max_tokens: int | None, stop: Sequence[str]) -> dict[str, Any]:
    """The settings as servers name them; those that change nothing are left out, for not all servers know all."""
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    asked |= {"temperature": params.temperature, "seed": params.seed % 2**31}
    asked |= {name: getattr(params, name) for name, off in _NEUTRAL.items() if getattr(params, name) != off}
    if "repetition_penalty" in asked:
        asked["repeat_penalty"] = asked["repetition_penalty"]  # llama.cpp's name
    if max_tokens is not None:
        asked["max_tokens"] = max_tokens
    if stop:
        asked["stop"] = list(stop)
    return asked


async def _next(events: AsyncIterator[Any], is_cancelled: Callable[[], bool]) -> Any:
    """The next event or, at the end, None; Cancelled as soon as nobody waits for it."""
    coming = asyncio.ensure_future(anext(events, None))
    try:
        while not coming.done():
            await asyncio.wait({coming}, timeout=_POLL_S)
            if is_cancelled():
                raise Cancelled
        return coming.result()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})


async def _events(url: str, key: str | None, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of every event until `[DONE]`, or until the server hangs up."""
    try:
        async with (
            _client(url, key) as client,
            client.stream("POST", f"{url}/chat/completions", json=body) as response,
        ):
            if response.is_error:
                await response.aread()
                raise _refusal(url, response, key, str(body["model"]))
            async for line in response.aiter_lines():
                field, _, value = line.partition(":")
                if field != "data" or not value.strip():
                    continue
                if value.strip() == "[DONE]":
                    return
                event = json.loads(value)
                if fault := event.get("error"):
                    raise ConnectionError(f"{url} says: {_words(fault)}")
                yield event
    except httpx.HTTPError as error:
        raise _failure(url, error) from error
    except json.JSONDecodeError as error:
        raise ConnectionError(f"{url} sends a stream that is no JSON: {error}") from error


async def _get(url: str, key: str | None) -> httpx.Response:
    try:
        async with _client(url, key) as client:
            response = await client.get(url)
    except httpx.HTTPError as error:
        raise _failure(url, error) from error
    if response.is_error:
        raise _refusal(url, response, key, None)
    return response


def _client(url: str, key: str | None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, trust_env=httpx.URL(url).host not in _HERE)


def _failure(url: str, error: httpx.HTTPError) -> ConnectionError:
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return ConnectionError(f"no server answers at {url}: start it, or give another --engine")
    return ConnectionError(f"{url} broke off: {error or type(error).__name__}")


def _refusal(url: str, response: httpx.Response, key: str | None, model: str | None) -> ConnectionError | ValueError:
    try:
        content = response.json()
        reason = _words(content.get("error", content))
    except (ValueError, AttributeError):
        reason = response.reason_phrase
    if response.status_code in _REFUSED:
        what = "refuses the key in SPECEXEC_ENGINE_KEY" if key else "wants a key: set SPECEXEC_ENGINE_KEY"
        return ConnectionError(f"{url} {what} ({response.status_code}: {reason})")
    if response.status_code == 404:
        hint = f"model {model!r} may not be served there (--target)" if model else "the address may lack its /v1"
        return ConnectionError(f"{url} is not found: {hint}: {reason}")
    kind = Refused if response.status_code in (400, 413, 422) else ConnectionError
    return kind(f"{url} answers {response.status_code}: {reason}")


def _words(fault: Any) -> str:
    """What an error object says, in one line."""
    said = fault.get("message") or fault.get("detail") or fault if isinstance(fault, dict) else fault
    return " ".join(str(said).split())
