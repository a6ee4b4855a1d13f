"""What is checked before a request is read: its size, its key, its type, and that no web page stands behind it."""

import asyncio
import contextlib
import hmac
import json
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.answers import Json, problem

MAX_BODY_BYTES = 8 << 20
LINGER_BYTES, LINGER_S = 64 << 20, 5.0  # of a refused body, read so that the refusal arrives
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_OPEN = ("/health",)


class Guard:
    """Wraps an application. api_key: None asks for none. hosts: the names that a Host header may have; None: any.

    A page in a browser can reach a server on its own machine. It can send neither a JSON content type nor a key
    without asking first, which is never granted, and a name that it made point here is not in `hosts`.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, hosts: Collection[str] | None) -> None:
        self._app, self._api_key, self._hosts = app, api_key, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if (refusal := self._refusal(scope, headers)) is not None:
            await _refuse(receive, send, *refusal)
            return
        await self._app(scope, _limited(receive), send)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, Json] | None:
        path = scope["path"]
        is_api = path.startswith("/v1/") or path == "/metrics"
        if self._hosts is not None and _host(headers) not in self._hosts:
            return 403, problem(f"this server does not answer for the host {_host(headers)!r}", "invalid_request_error")
        if scope["method"] == "POST" and headers.get("origin", "//" + headers.get("host", "")).partition("//")[2] != (
            headers.get("host", "")
        ):
            return 403, problem("this server takes nothing from other web pages", "invalid_request_error")
        if is_api and self._api_key is not None and not self._has_key(headers):
            return 401, problem(
                "give the server's key as `Authorization: Bearer KEY`", "authentication_error", code="invalid_api_key"
            )
        if int(headers.get("content-length", "0")) > MAX_BODY_BYTES:
            return 413, _too_large()
        if is_api and scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return 415, problem("the content type must be application/json", "invalid_request_error")
        return None

    def _has_key(self, headers: dict[str, str]) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        assert self._api_key is not None
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._api_key.encode())


class TooLarge(Exception):  # noqa: N818 (read as a sentence: raise TooLarge)
    """A body that did not announce how large it is has become larger than any may be."""


def _limited(receive: Receive) -> Receive:
    received = 0

    async def receive_some() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise TooLarge
        return message

    return receive_some


def too_large() -> tuple[int, Json]:
    """Status and body for TooLarge."""
    return 413, _too_large()


def _too_large() -> Json:
    return problem(f"the request is larger than the {MAX_BODY_BYTES >> 20} MiB it may have", "invalid_request_error")


def _host(headers: dict[str, str]) -> str:
    host = headers.get("host", "")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


async def _refuse(receive: Receive, send: Send, status: int, body: Json) -> None:
    """Answers at once, then takes in what the client still sends.

    Closing a connection with bytes unread resets it, and the client may lose the answer that explains why.
    """
    answer = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(answer)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answer, "more_body": True})
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_discard(receive), LINGER_S)
    await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    received = 0
    while received < LINGER_BYTES:
        message = await receive()
        received += len(message.get("body", b""))
        if not message.get("more_body", False):
            return
