"""Thoughts: left out however their marks are cut, and whole where the model's template itself opens them."""

import io
import json
import shutil
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import served
from tiny_tokenizer import tiny_tokenizer

from app.cli import main
from app.thinking import ThinkingFilter

OPTIONS = ["--draft", "none", "--dtype", "float32", "--ctx", "256", "--max-tokens", "8", "--min-tokens", "8"]
USER = [{"role": "user", "content": "the cat"}]


@given(st.lists(st.sampled_from(["<", "think", ">", "</", "think>", "a", "\n", "<think>", "</think>"]), max_size=12))
def test_thinking_is_left_out_however_it_is_cut(pieces):
    together, apart = ThinkingFilter(), ThinkingFilter()
    whole = together.push("".join(pieces)) + together.flush()
    assert "".join(apart.push(piece) for piece in pieces) + apart.flush() == whole
    assert "<think>" not in whole


def test_a_thought_is_hidden():
    shown = ThinkingFilter()
    assert shown.push("a <thi") + shown.push("nk>b</th") + shown.push("ink>\n\nc <") + shown.flush() == "a c <"


@pytest.fixture(scope="module")
def thinker(chat_model, tmp_path_factory):
    """The tiny chat model with a template that ends inside a thought."""
    directory = shutil.copytree(chat_model, tmp_path_factory.mktemp("thinker") / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(thinker, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEXEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        with served(thinker, max_tokens="8", min_tokens="8") as running:
            yield running


def test_only_an_open_thought_at_the_very_end_counts(server):
    session = server.host.running.session
    assert session.opening(session.encode_chat(USER)) == "<think>\n"
    for text in ("<think>\n\n</think>\n\n", "what is <think>?", "\n", "", "<thin"):
        assert session.opening(session.encode_raw(text)) == ""


@pytest.mark.parametrize("is_hidden", [True, False])
def test_chat_and_run_show_it_whole_or_not_at_all(thinker, capsys, monkeypatch, tmp_path, is_hidden):
    kept = tmp_path / "kept.json"
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"the cat\n/save {kept}\n"))
    hide = ["--hide-thinking"] if is_hidden else []
    assert main(["chat", "--target", str(thinker), *OPTIONS, *hide]) == 0
    out = capsys.readouterr().out
    answer = json.loads(kept.read_text())["messages"][1]["content"]
    assert answer.startswith("<think>\n") and answer.count("<think>") == 1
    assert out.strip() == ("" if is_hidden else answer.strip())
    assert main(["run", "the cat", "--target", str(thinker), *OPTIONS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == answer
    assert main(["run", "the cat", "--target", str(thinker), *OPTIONS, "--json", "--raw"]) == 0
    assert "<think>" not in json.loads(capsys.readouterr().out)["text"]


def test_the_server_and_the_page_pass_it_on_whole(server):
    body = {"messages": USER, "temperature": 0}
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    text = whole["choices"][0]["message"]["content"]
    assert text.startswith("<think>\n") and whole["usage"]["completion_tokens"] == 8
    lines = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
    plain = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a <think>\n", "temperature": 0}, timeout=60)
    assert "<think>" not in plain.json()["choices"][0]["text"]


@pytest.mark.filterwarnings("ignore")  # Gradio's own deprecations
def test_the_page_gets_the_mark_that_it_collapses(server):
    from app.ui import Page

    page = Page(server.host, server.host.running.chosen)
    *_, last = page.send("the cat", [], SimpleNamespace(session_hash="x"), "", 0, 1, 0, 0, 1, 8, None)
    assert last[1][-1]["content"].startswith("<think>\n")
