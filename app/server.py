"""The HTTP interface: OpenAI's routes over one host, streamed or whole, given up when the client leaves."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.answers import Envelope, error_of, problem
from app.guard import TooLarge, too_large
from app.host import Host, NotReady
from app.launch import Running
from app.protocol import ChatRequest, CompletionRequest, GenerationRequest, Refused, parse
from app.session import Chunk
from app.worker import Outcome, Ticket
from app.worker import Request as Order

KEEP_ALIVE_S = 10.0


class Gone(Exception):  # noqa: N818 (nothing is wrong)
    """The client has left."""


class UnknownModel(ValueError):  # noqa: N818
    """A request names another model than the one that is loaded."""


def build(host: Host) -> FastAPI:
    """The application; its host is closed by whoever opened it."""
    api = FastAPI(title="specexec", docs_url=None, redoc_url=None, openapi_url=None)

    @api.get("/health")
    def health() -> JSONResponse:
        state = host.state
        body: dict[str, Any] = {"status": "ok" if state.kind == "ready" else state.kind}
        if state.kind == "loading":
            body |= {"phase": state.detail, "progress": state.share, "left_s": state.left_s}
        if state.kind == "failed":
            body["message"] = state.detail
        return JSONResponse(body, 200 if state.kind == "ready" else 503)

    @api.get("/metrics")
    def metrics() -> Response:
        return Response(host.metrics.text(), media_type="text/plain; version=0.0.4")

    @api.get("/v1/models")
    def models() -> JSONResponse:
        data = [_model_entry(host.running)] if host.running else []
        return JSONResponse({"object": "list", "data": data})

    @api.get("/v1/models/{name:path}")
    def model(name: str) -> JSONResponse:
        return JSONResponse(_model_entry(_running(host, name)))

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answered(host, request, ChatRequest)

    @api.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await _answered(host, request, CompletionRequest)

    @api.exception_handler(404)
    @api.exception_handler(405)
    def no_route(request: Request, error: Exception) -> JSONResponse:
        status = getattr(error, "status_code", 404)
        return JSONResponse(problem(f"no {request.method} {request.url.path} here", "invalid_request_error"), status)

    for kind in (Refused, NotReady, UnknownModel):
        api.add_exception_handler(kind, _refuse)
    return api


def model_name(running: Running) -> str:
    """What clients call the loaded model: its preset, else the last part of the target's name."""
    return running.chosen.preset or str(running.chosen.settings.target).rstrip("/").rpartition("/")[2]


def _refuse(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, UnknownModel):
        return JSONResponse(
            problem(str(error), "invalid_request_error", param="model", code="model_not_found"), status_code=404
        )
    status, body = error_of(error)
    return JSONResponse(body, status)


def _model_entry(running: Running) -> dict[str, Any]:
    return {
        "id": model_name(running),
        "object": "model",
        "created": 0,
        "owned_by": "specexec",
        "target": running.chosen.settings.target,
        "context_length": running.session.ctx,
    }


def _running(host: Host, name: str | None) -> Running:
    if (running := host.running) is None:
        raise NotReady(f"no model is ready to answer: {host.state}")
    if name not in (None, model_name(running), running.chosen.settings.target):
        raise UnknownModel(f"no model {name!r} here; there is {model_name(running)!r}")
    return running


async def _answered(host: Host, http: Request, kind: type[GenerationRequest]) -> Response:
    try:
        asked = parse(kind, await http.body())
        running = _running(host, asked.model)
        order = await asyncio.to_thread(_order, running, asked)
        answer = Answer(host, order)
    except TooLarge:
        status, body = too_large()
        return JSONResponse(body, status)
    except (Refused, NotReady, UnknownModel):
        raise
    except Exception as error:  # the server's mouth: whatever it is, the client is told
        status, body = error_of(error)
        return JSONResponse(body, status, headers={"Retry-After": "1"} if status == 429 else None)
    envelope = Envelope(model_name(running), isinstance(asked, ChatRequest), running.session.text_of)
    if asked.stream:
        events = _events(answer, envelope, http, with_usage=asked.stream_options.include_usage)
        return _Stream(answer, events)
    return await _whole(answer, envelope, http)


def _order(running: Running, asked: GenerationRequest) -> Order:
    """What the worker is asked for; ValueErrors become Refused with the field at fault."""
    settings, session = running.chosen.settings, running.session
    seed = settings.seed if "seed" in running.chosen.origins else random.getrandbits(63)
    params = asked.params(settings, seed=seed)
    if running.plan is None and asked.num_logprobs is not None:
        raise Refused("logprobs are not passed on from another server", "logprobs")
    field = "messages" if isinstance(asked, ChatRequest) else "prompt"
    try:
        if isinstance(asked, ChatRequest):
            system = [{"role": "system", "content": settings.system}] if settings.system else []
            messages = [message.plain() for message in asked.messages]
            prompt = session.encode_chat(messages if messages[0]["role"] == "system" else system + messages)
        elif isinstance(asked.prompt, str):
            prompt = session.encode_raw(asked.prompt)
        else:
            prompt = asked.prompt
            if not all(0 <= token < session.vocab_size for token in prompt):
                raise ValueError(f"token ids are from 0 to {session.vocab_size - 1}")
        session.require_room(prompt)
    except ValueError as error:
        raise Refused(str(error), field) from error
    most = asked.most_tokens or settings.max_tokens
    opening = session.opening(prompt) if isinstance(asked, ChatRequest) else ""
    return Order(prompt, params, most, asked.stop or settings.stop, asked.num_logprobs, opening)


class Answer:
    """The outcomes of one order, awaited."""

    def __init__(self, host: Host, order: Order) -> None:
        self._host, self.wants_logprobs = host, order.num_logprobs is not None
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._ticket: Ticket = host.submit(order, _into(self._outcomes, asyncio.get_running_loop()))

    @property
    def place(self) -> int:
        return self._host.place(self._ticket)

    @asynccontextmanager
    async def chunks(self, http: Request) -> AsyncIterator[AsyncIterator[Chunk | None]]:
        """Chunks as they come, None where nothing has for a while. Raises Gone, or what went wrong."""
        leaving = asyncio.create_task(_left(http))
        try:
            yield self._relay(leaving)
        finally:
            leaving.cancel()

    def give_up(self) -> None:
        """Frees the place, or ends the pass; without effect once all has come."""
        self._host.cancel(self._ticket)

    async def _relay(self, leaving: asyncio.Task[None]) -> AsyncIterator[Chunk | None]:
        while True:
            coming = asyncio.create_task(self._outcomes.get())
            try:
                await asyncio.wait({coming, leaving}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    raise Gone
                outcome = coming.result() if coming.done() else None
            finally:
                coming.cancel()
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
            if outcome is not None and outcome.stats.finish_reason:
                return


def _into(outcomes: asyncio.Queue[Outcome], loop: asyncio.AbstractEventLoop) -> Callable[[Outcome], None]:
    def deliver(outcome: Outcome) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(outcomes.put_nowait, outcome)

    return deliver


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _whole(answer: Answer, envelope: Envelope, http: Request) -> Response:
    pieces, logprobs = [], []
    try:
        async with answer.chunks(http) as chunks:
            async for chunk in chunks:
                if chunk is not None:
                    pieces.append(chunk.text)
                    logprobs += chunk.logprobs
                    stats = chunk.stats
    except Gone:
        return Response(status_code=499)
    except Exception as error:  # the server's mouth
        status, body = error_of(error)
        return JSONResponse(body, status)
    finally:
        answer.give_up()
    return JSONResponse(envelope.whole("".join(pieces), stats, logprobs if answer.wants_logprobs else None))


class _Stream(StreamingResponse):
    """Events of an answer, which is given up when the client has left, even before the first."""

    def __init__(self, answer: Answer, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.give_up()


async def _events(answer: Answer, envelope: Envelope, http: Request, *, with_usage: bool) -> AsyncIterator[str]:
    try:
        async with answer.chunks(http) as chunks:
            if envelope.is_chat:
                yield _event(envelope.role())
            async for chunk in chunks:
                if chunk is None:
                    place = answer.place
                    yield f": waiting, {place} before this one\n\n" if place else ": computing\n\n"
                    continue
                if chunk.text or chunk.logprobs:
                    yield _event(envelope.delta(chunk.text, chunk.logprobs if answer.wants_logprobs else None))
                if chunk.stats.finish_reason:
                    yield _event(envelope.last(chunk.stats))
                    if with_usage:
                        yield _event(envelope.final_usage(chunk.stats))
                    yield "data: [DONE]\n\n"
    except Gone:
        return
    except Exception as error:  # the server's mouth: an error in mid-stream must not look like an end
        yield _event(error_of(error)[1])


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
