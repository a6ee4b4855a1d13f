"""The command `serve`: HTTP interface and web page of one model, from the start of its load to a graceful end."""

import ipaddress
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import uvicorn
from starlette.types import ASGIApp

from app.environment import is_offline
from app.guard import LOOPBACK, Guard
from app.host import Host
from app.server import build
from app.settings import Resolved

_STREAMS_END_S = 3  # answers get their error chunk at once; pages that stay open are cut off


def serve_model(
    chosen: Resolved, *, host: str, port: int, api_key: str | None, with_ui: bool, offline: bool, max_waiting: int
) -> int:
    """Serves until it is interrupted. ValueError where strangers could reach it and no key is set."""
    is_local = _is_loopback(host)
    if not is_local and not api_key:
        raise ValueError(f"--host {host} lets others in: set a key with --api-key or SPECEXEC_API_KEY")
    failures: list[Exception] = []
    with bound(host, port) as listening, closing(_host(offline, max_waiting)) as models:
        app: ASGIApp = build(models)
        if with_ui:
            from app.ui import mounted

            app = mounted(app, models, chosen, api_key=None if is_local else api_key)
        hosts = (*LOOPBACK, host) if is_local else None
        server = GracefulServer(Guard(app, api_key=api_key, hosts=hosts), models)
        models.load(chosen, on_failure=lambda error: (failures.append(error), server.ask_to_end()))
        shown = f"[{host}]" if ":" in host else host
        _note(f"serving on http://{shown}:{listening.getsockname()[1]} (Ctrl-C ends it)")
        server.run(sockets=[listening])
    if failures:
        raise failures[0]
    return 0


class GracefulServer(uvicorn.Server):
    """Ends running answers with an error chunk before it closes their connections."""

    def __init__(self, app: ASGIApp, models: Host) -> None:
        # Clients are told what goes wrong; what is left to log is that open pages were cut off at the end.
        super().__init__(
            uvicorn.Config(
                app, log_level="critical", access_log=False, timeout_graceful_shutdown=_STREAMS_END_S, lifespan="on"
            )
        )
        self._models = models

    def ask_to_end(self) -> None:
        """May be called from any thread."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called once no more connections are to be taken."""
        self._models.stop()
        await super().shutdown(sockets)


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket; port 0 takes a free one. OSError in one line if the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen()
        except OSError as error:
            raise OSError(f"cannot serve on {host} port {port}: {error.strerror}; try another --port") from error
        yield listening


def _host(offline: bool, max_waiting: int) -> Host:
    return Host(offline=offline or is_offline(), note=_note, max_waiting=max_waiting)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
