"""Another server as engine: the project's own one answers as it does at first hand; what goes wrong is one line."""

import io
import json
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import openai
import pytest
from serving import holding, served, until

from app.cli import main
from app.remote import RemoteSession, connect
from app.worker import Request, Worker
from specexec.sampling import SamplingParams

USER = [{"role": "user", "content": "the cat sat"}]
OPTIONS = ["--temp", "0.8", "--seed", "4", "--max-tokens", "12"]


@pytest.fixture(scope="module")
def server(chat_model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEXEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        with served(chat_model) as running:
            yield running


@pytest.fixture
def engine(server):
    return f"{server.url}/v1"


def direct(engine, **changes):
    """The answer at first hand."""
    body = {"messages": USER, "temperature": 0.8, "seed": 4, "max_tokens": 12, **changes}
    return httpx.post(f"{engine}/chat/completions", json=body, timeout=60).json()


def test_run_gives_the_servers_text_and_counts(engine, capsys):
    expected = direct(engine)
    assert main(["run", "the cat sat", "--engine", engine, *OPTIONS, "--json"]) == 0
    out, status = capsys.readouterr()
    report = json.loads(out)
    assert report["text"] == expected["choices"][0]["message"]["content"]
    assert (report["tokens"], report["prompt_tokens"]) == (12, expected["usage"]["prompt_tokens"])
    assert report["finish_reason"] == expected["choices"][0]["finish_reason"]
    assert report["engine"] == engine and "tokens_per_pass" not in report
    assert "12 tokens |" in status and "tokens/pass" not in status and "peak" not in status


def test_every_sampling_setting_is_passed_on(engine, capsys):
    flags = {"top-p": 0.7, "top-k": 9, "min-p": 0.05, "presence-penalty": 0.5, "frequency-penalty": 0.25}
    flags |= {"repeat-penalty": 1.2, "min-tokens": 12}
    fields = {name.replace("-", "_"): value for name, value in flags.items()}
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    assert main(["run", "the cat sat", "--engine", engine, *OPTIONS, *arguments, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert text == direct(engine, **fields)["choices"][0]["message"]["content"]
    assert text != direct(engine)["choices"][0]["message"]["content"]
    stop = text[4:6]
    assert main(["run", "the cat sat", "--engine", engine, *OPTIONS, *arguments, "--json", "--stop", stop]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == text[: text.index(stop)]


def test_chat_over_a_pipe(engine, capsys, monkeypatch, tmp_path):
    kept = tmp_path / "kept.json"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"the cat sat\n/stats\n/set temp 0\n/retry\n/save {kept}\n/bye\n"))
    assert main(["chat", "--engine", engine, *OPTIONS]) == 0
    out, status = capsys.readouterr()
    first = direct(engine)["choices"][0]["message"]["content"]
    assert out.startswith(first)
    greedy = direct(engine, temperature=0)["choices"][0]["message"]["content"]
    assert json.loads(kept.read_text())["messages"][1]["content"] == greedy != first
    assert "computed before" in out and "drafted" not in out
    assert status.count("12 tokens |") == 2 and "engine: " in status


def test_bench_writes_rates_and_times_but_nothing_of_passes(engine, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question_id": 1, "category": "coding", "turns": ["the cat", "and the dog"]}\n')
    out = tmp_path / "out"
    assert main(["bench", str(prompts), "--engine", engine, *OPTIONS, "--out", str(out), "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results == json.loads((out / "results.json").read_text())
    assert results["tokens_per_s"] > 0 and set(results["by_category"]) == {"coding"}
    assert float(results["timing"]["TTFT Time"]["mean"]) > 0
    assert "acceptance" not in results and "tokens_per_pass" not in json.dumps(results)
    assert "| all |" in (out / "results.md").read_text()
    assert main(["bench", "--engine", engine, "--drafts", "ngram"]) == 2
    assert "--drafts" in capsys.readouterr().err


def test_a_server_over_a_server(engine):
    with served(None, engine=engine) as front, openai.OpenAI(base_url=f"{front.url}/v1", api_key="x") as client:
        (model,) = client.models.list().data
        parts = client.chat.completions.create(
            model=model.id, messages=USER, temperature=0.8, seed=4, max_tokens=12, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        *chunks, last = parts
        text = "".join(part.choices[0].delta.content or "" for part in chunks if part.choices)
        assert text == direct(engine)["choices"][0]["message"]["content"]
        assert last.usage.completion_tokens == 12
        with pytest.raises(openai.APIStatusError, match="logprobs are not passed on") as refused:
            client.chat.completions.create(model=model.id, messages=USER, logprobs=True)
        assert refused.value.status_code == 400
        for prompt in ("the", [1, 2]):
            with pytest.raises(openai.BadRequestError, match="only chats"):
                client.completions.create(model=model.id, prompt=prompt)
        metrics = httpx.get(f"{front.url}/metrics").text
        assert "specexec_generated_tokens_total 12.0" in metrics


def test_hanging_up_ends_the_servers_work(engine, server):
    outcomes = []
    with holding(server.host), closing(Worker(connect(engine, None, None))) as worker:
        ticket = worker.submit(Request(USER, SamplingParams(), max_tokens=100), outcomes.append)
        until(lambda: server.host.worker.num_running == 1)
        worker.cancel(ticket)
        until(lambda: outcomes)
        until(lambda: server.host.worker.num_running == 0)
    assert len(outcomes) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--bits", "4"], "--bits has no effect"), (["--draft", "ngram"], "--draft has no"), (["--ctx", "99"], "--ctx")],
)
def test_what_only_the_built_in_engine_knows_is_refused(engine, capsys, arguments, words):
    assert main(["run", "x", "--engine", engine, *arguments]) == 2
    assert words in one_line(capsys)


def one_line(capsys):
    out, error = capsys.readouterr()
    lines = [line for line in error.splitlines() if not line.startswith("engine: ")]
    assert not out.strip() and len(lines) == 1, error
    return lines[0]


def test_the_key_comes_from_the_environment(chat_model, capsys, monkeypatch):
    with served(chat_model, api_key="secret") as guarded:
        ask = ["run", "the cat sat", "--engine", f"{guarded.url}/v1", *OPTIONS]
        assert main(ask) == 1
        assert "wants a key: set SPECEXEC_ENGINE_KEY (401" in one_line(capsys)
        monkeypatch.setenv("SPECEXEC_ENGINE_KEY", "wrong")
        assert main(ask) == 1
        assert "refuses the key in SPECEXEC_ENGINE_KEY (401" in one_line(capsys)
        monkeypatch.setenv("SPECEXEC_ENGINE_KEY", "secret")
        assert main(ask) == 0
        assert "12 tokens" in capsys.readouterr().err


def test_no_server_no_model_no_interface(engine, server, capsys):
    with served_by(b"") as silent:
        port = silent.rpartition(":")[2].partition("/")[0]
    for address, words in [
        (f"http://127.0.0.1:{port}/v1", "no server answers at"),
        (server.url, "the address may lack its /v1"),
        ("localhost:8000", "--engine must be an address"),
    ]:
        assert main(["run", "x", "--engine", address]) in (1, 2)
        assert words in one_line(capsys)
    assert main(["run", "x", "--engine", engine, "--target", "nobody"]) == 1
    assert "model 'nobody' may not be served there" in one_line(capsys)


MODELS = b'{"data": [{"id": "m", "max_model_len": 99}]}'
DELTA = b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n'


@contextmanager
def served_by(answer, status=200, models=MODELS):
    """The address of a server that answers every chat with these bytes and hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(200, models)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(status, answer)

        def _send(self, status, content):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (DELTA, 200, "broke off before the answer was over"),
        (DELTA + b'data: {"error": {"message": "out of\\nmemory"}}\n\n', 200, "says: out of memory"),
        (b"data: {half", 200, "no JSON"),
        (b'{"error": {"message": "busy"}}', 503, "answers 503: busy"),
        (b'{"object": "error", "message": "too long"}', 400, "answers 400: too long"),
        (b"<html>", 500, "answers 500: Internal Server Error"),
    ],
)
def test_streams_that_go_wrong(capsys, monkeypatch, answer, status, words):
    with served_by(answer, status) as address:
        monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n/retry\n"))
        assert main(["chat", "--engine", address]) == 0
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if not line.startswith("engine: ")]
        assert len(lines) == 2 and words in lines[0] and "nothing has been asked" in lines[1]
        assert main(["run", "the cat", "--engine", address]) == 1
        assert words in capsys.readouterr().err


def test_lists_of_models():
    several = b'{"data": [{"id": "a"}, {"id": "b"}]}'
    with served_by(b"", models=several) as address:
        with pytest.raises(ValueError, match="serves a, b: name one with --target"):
            connect(address, None, None)
        assert connect(address, "b", None).model == "b"
    with served_by(b"") as address:
        assert (connect(address, None, None).model, connect(address, None, None).ctx) == ("m", 99)
    with (
        served_by(b"", models=b"<html>") as address,
        pytest.raises(ConnectionError, match="not an OpenAI-compatible server"),
    ):
        connect(address, None, None)


def test_thoughts_that_come_apart_are_marked():
    def event(**delta):
        return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"

    over = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    thoughts = event(role="assistant", content=None) + event(reasoning_content="so") + event(reasoning=" it is")
    for rest, expected in [(event(content="yes"), "<think>so it is</think>\n\nyes"), (b"", "<think>so it is</think>")]:
        with served_by(thoughts + rest + over) as address:
            chunks = list(RemoteSession(address, "m", None, None).stream(USER, SamplingParams()))
        assert "".join(chunk.text for chunk in chunks) == expected
        assert chunks[-1].stats.finish_reason == "stop"
