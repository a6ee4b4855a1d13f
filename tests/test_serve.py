"""The command `serve`: what it says is so, and who may ask."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from app.serve import bound

ROOT = Path(__file__).parents[1]


def test_a_bound_socket_listens() -> None:
    with bound("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname(), timeout=5):
        pass


def test_an_address_that_is_taken_or_not_there_is_one_line() -> None:
    with bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot serve on 127.0.0.1 port {port}: .*; try another --port"):
            bound("127.0.0.1", port).__enter__()


@pytest.mark.skipif(sys.platform == "darwin", reason="has 127.0.0.1 only")
def test_any_loopback_address_answers_for_itself(chat_model: Path, tmp_path: Path) -> None:
    """From the moment that it says where."""
    command = [sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())", "serve", "--no-ui"]
    command += ["--host", "127.0.0.2", "--port", "0", "--target", str(chat_model), "--draft", "none", "--ctx", "64"]
    environment = {**os.environ, "SPECEXEC_CACHE": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as child:
        try:
            url = re.search(r"http://127\.0\.0\.2:\d+", child.stderr.readline())[0]
            assert httpx.get(f"{url}/health", timeout=60).status_code in (200, 503)  # it may load still
            for host, is_ours in (("127.0.0.2", True), ("localhost", True), ("elsewhere.example", False)):
                status = httpx.get(f"{url}/v1/models", headers={"host": host}, timeout=60).status_code
                assert (status != 403) == is_ours, host
        finally:
            child.send_signal(signal.SIGINT)
            child.communicate(timeout=120)
