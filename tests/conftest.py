"""What every test file shares: an environment of its own, and one tiny checkpoint that can chat."""

import os
import signal

import pytest
import tiny
from tiny_tokenizer import tiny_tokenizer

# A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that; a handler they do not.
signal.signal(signal.SIGINT, signal.default_int_handler)


ALONE = {"test_verify.py", "test_exact.py", "test_rejection.py"}  # long tests that share nothing: any worker, any order


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests of one file stay with one worker, which then makes what they share once."""
    for item in items:
        if item.path.name not in ALONE:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SPECEXEC_") and name != "SPECEXEC_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """A directory with a four-layer llama and a tokenizer that has a chat template; do not change it."""
    directory = tmp_path_factory.mktemp("chat_model")
    tiny.save(tiny.tiny_model("llama"), directory, max_shard_size="200KB")
    tiny_tokenizer().save_pretrained(directory)
    return directory
