"""A real server on a free port, in this process: what the tests of HTTP and of the web page talk to."""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

from app.guard import LOOPBACK, Guard
from app.host import Host
from app.presets import chosen_settings
from app.serve import GracefulServer, bound
from app.server import build

FLAGS = {"draft": "ngram", "dtype": "float32", "ctx": "256", "budget": "8", "seed": "1"}


@dataclass(frozen=True)
class Served:
    """A running server and what is behind it."""

    url: str
    host: Host
    server: GracefulServer
    thread: threading.Thread


@contextmanager
def served(model, *, api_key=None, max_waiting=64, make_app=None, wait=True, engine=None, **flags):
    """Serves `model`, or what `engine` serves; `make_app(api, host, chosen)` may put something around the interface."""
    own = {"engine": engine} if engine else {**FLAGS, "target": str(model)}
    chosen = chosen_settings(None, {**own, **flags})
    host = Host(offline=True, note=lambda line: None, max_waiting=max_waiting)
    api = build(host)
    app = make_app(api, host, chosen) if make_app else api
    server = GracefulServer(Guard(app, api_key=api_key, hosts=LOOPBACK), host)
    with bound("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        host.load(chosen)
        thread.start()
        try:
            until(lambda: server.started)
            if wait:
                until(lambda: host.state.kind != "loading")
                assert host.state.kind == "ready", host.state
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", host, server, thread)
        finally:
            server.ask_to_end()
            thread.join(20)
            host.close()


@contextmanager
def holding(host):
    """Holds every pass at its second layer until its answer is given up, or the event that this yields is set."""
    released = threading.Event()

    def hold(*_):
        while not (released.is_set() or host.worker._running.is_given_up):
            time.sleep(0.01)

    handle = host.running.session.target.layers[1].register_forward_pre_hook(hold)
    try:
        yield released
    finally:
        released.set()
        handle.remove()


def until(condition, timeout_s=60.0):
    """Waits for `condition`, or fails."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
