"""The real openai client against a real server: contract, errors, disconnects, load, graceful end."""

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from serving import holding, served, until

import app.server
from app.cli import main

SEED = 5  # of an answer of twelve tokens
ROOT = Path(__file__).parent.parent
USER = [{"role": "user", "content": "the cat sat"}]


@pytest.fixture(scope="module")
def server(chat_model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEXEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        with served(chat_model) as running:
            yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def ask(client, **changes):
    return client.chat.completions.create(
        **{"model": client.models.list().data[0].id, "messages": USER, "max_tokens": 20, "seed": 3, **changes}
    )


def test_models_and_health(client, server):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5}])
def test_streamed_text_is_the_whole_text(client, sampling):
    whole = ask(client, **sampling)
    parts = list(ask(client, **sampling, stream=True, stream_options={"include_usage": True}))
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == whole.choices[0].finish_reason
    assert not parts[-1].choices and parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    timings = parts[-2].timings
    assert {"prompt_n", "cached_n", "prompt_ms", "predicted_n", "predicted_ms", "drafted_n", "accepted_n"} <= set(
        timings
    )
    assert timings["passes"] <= timings["predicted_n"]
    assert timings["streamed_bytes"] == 0


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_max_tokens_to_the_letter(client, field, count):
    answer = ask(client, **{"max_tokens": None, field: count})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (count, "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + count


def test_without_max_tokens_the_context_is_filled(client, server):
    answer = ask(client, max_tokens=None)
    assert answer.choices[0].finish_reason == "stop" or answer.usage.total_tokens == server.host.running.session.ctx


def test_stop_strings_are_cut_in_both_forms(client):
    text = ask(client).choices[0].message.content
    middle = text[len(text) // 2 : len(text) // 2 + 2]
    for stop in (middle, [middle, "never"]):
        answer = ask(client, stop=stop)
        assert answer.choices[0].message.content == text[: text.index(middle)]
        assert answer.choices[0].finish_reason == "stop"
        streamed = "".join(part.choices[0].delta.content or "" for part in ask(client, stop=stop, stream=True))
        assert streamed == answer.choices[0].message.content


def test_the_seed_decides(client):
    texts = {seed: ask(client, temperature=1.2, seed=seed).choices[0].message.content for seed in (1, 2)}
    assert texts[1] != texts[2]
    assert ask(client, temperature=1.2, seed=1).choices[0].message.content == texts[1]


def test_logprobs_are_the_targets_own_one_per_token(client, server):
    answer = ask(client, logprobs=True, top_logprobs=3, temperature=0.8, max_tokens=12, seed=SEED)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens == 12
    session = server.host.running.session
    prompt = session.encode_chat(USER)
    tokens = whole_tokens(session, prompt, answer)
    logits = session.target.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits[:, : session.vocab_size].log_softmax(-1)
    for entry, row, token in zip(entries, expected, tokens, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
        assert entry.token == session.text_of(token)
    streamed = [
        each
        for part in ask(client, logprobs=True, top_logprobs=3, temperature=0.8, max_tokens=12, seed=SEED, stream=True)
        if part.choices[0].logprobs
        for each in part.choices[0].logprobs.content
    ]
    assert [each.token for each in streamed] == [each.token for each in entries]


def whole_tokens(session, prompt, answer):
    """The ids behind an answer: those that the same request draws from the session itself."""
    from specexec.sampling import SamplingParams

    chunks = session.stream(
        prompt, SamplingParams(temperature=0.8, seed=SEED), max_tokens=answer.usage.completion_tokens
    )
    return [token for chunk in chunks for token in chunk.step.tokens]


def test_completions_with_text_ids_and_logprobs(client, server):
    options = {"model": app.server.model_name(server.host.running), "max_tokens": 8, "seed": 1}
    plain = client.completions.create(prompt="the cat", logprobs=2, **options)
    ids = server.host.running.session.encode_raw("the cat")
    assert client.completions.create(prompt=ids, **options).choices[0].text == plain.choices[0].text
    logprobs = plain.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8
    streamed = client.completions.create(prompt=["the cat"], stream=True, **options)
    assert "".join(part.choices[0].text for part in streamed) == plain.choices[0].text


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "the " * 400}]}, "messages"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ],
)
def test_what_is_not_supported_is_named(client, changes, param):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **changes)
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"
    assert param.split("[")[0] in raised.value.message or "prompt" in raised.value.message


def test_what_asks_for_nothing_is_accepted(client):
    answer = ask(
        client, n=1, tools=[], logit_bias={}, response_format={"type": "text"}, user="me", temperature=None, stop=None,
        extra_body={"top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0, "suffix": None},
    )  # fmt: skip
    again = ask(client, messages=[*USER, answer.choices[0].message.model_dump(), {"role": "developer", "content": [
        {"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]}])  # fmt: skip
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_unknown_model_and_route_and_broken_json(client, server):
    with pytest.raises(openai.NotFoundError) as raised:
        ask(client, model="gpt-9")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    for method, path in (("get", "/v1/nothing"), ("get", "/v1/completions")):
        assert "error" in httpx.request(method, server.url + path).json()
    answer = httpx.post(f"{server.url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_no_web_page_reaches_it(server):
    url = f"{server.url}/v1/chat/completions"
    body = json.dumps({"messages": USER, "max_tokens": 1})
    assert httpx.post(url, content=body, headers={"content-type": "text/plain"}).status_code == 415
    assert httpx.post(url, json={}, headers={"host": "evil.example"}).status_code == 403
    asked = httpx.options(url, headers={"origin": "http://evil.example", "access-control-request-method": "POST"})
    assert "access-control-allow-origin" not in asked.headers
    assert httpx.post(url, content=b" " * (9 << 20), headers={"content-type": "application/json"}).status_code == 413

    def pieces():
        for _ in range(9):
            yield b" " * (1 << 20)

    assert httpx.post(url, content=pieces(), headers={"content-type": "application/json"}).status_code == 413


@pytest.mark.parametrize("sends_all", [True, False])
def test_a_refusal_reaches_who_is_still_sending(server, sends_all, monkeypatch):
    monkeypatch.setattr("app.guard.LINGER_S", 60)  # however slowly this machine sends
    address = httpx.URL(server.url)
    head = "POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
    piece = b" " * (1 << 20)
    with socket.create_connection((address.host, address.port), timeout=60) as opened:
        opened.sendall(head.format(address.netloc.decode(), 9 * len(piece)).encode() + piece)
        answer = http.client.HTTPResponse(opened)
        if sends_all:
            for _ in range(8):
                time.sleep(0.02)  # the refusal has long been sent by then
                opened.sendall(piece)
        answer.begin()
        assert answer.status == 413 and "8 MiB" in json.loads(answer.read())["error"]["message"]


def test_the_second_turn_reuses_the_first(client):
    history = [{"role": "user", "content": "the cat sat on the mat and " * 6}]
    first = ask(client, messages=history, max_tokens=4)
    cached = ask(client, messages=history, max_tokens=4).usage.prompt_tokens_details.cached_tokens
    assert cached == first.usage.prompt_tokens - 1


def test_metrics_count(client, server):
    ask(client, max_tokens=5)
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(re.findall(r"^specexec_(\w+) ([\d.e+-]+)$", text, re.M))
    for name in ("requests_running", "requests_waiting", "prompt_tokens_total", "generated_tokens_total",
                 "prefix_tokens_reused_total", "drafted_tokens_total", "accepted_tokens_total", "target_passes_total",
                 "streamed_bytes_total", "link_bytes_per_second", "time_to_first_token_seconds_count",
                 "inter_token_latency_seconds_count", "tokens_per_pass_sum"):  # fmt: skip
        assert name in values
    assert float(values["resident_layers_ratio"]) == 1
    assert float(values["generated_tokens_total"]) >= 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_worker(server, stream):
    """In prefill and in the queue: what has left is not computed, down to the layer."""
    worker, layers, begun = server.host.worker, server.host.running.session.target.layers, []
    body = json.dumps({"messages": USER, "max_tokens": 100, "stream": stream})
    handles = [
        layer.register_forward_pre_hook(lambda *_, number=number: begun.append(number))
        for number, layer in enumerate(layers)
    ]
    leavers = [http.client.HTTPConnection(httpx.URL(server.url).netloc.decode(), timeout=120) for _ in range(3)]
    with holding(server.host):
        for waiting, each in enumerate(leavers):
            each.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            until(lambda: (worker.num_running, worker.num_waiting) == (1, waiting))  # noqa: B023
        until(lambda: begun == [0, 1])
        for waiting, each in reversed([*enumerate(leavers)]):
            each.close()
            until(lambda: worker.num_running + worker.num_waiting == waiting)  # noqa: B023
    for each in handles:
        each.remove()
    assert begun == [0, 1]


def test_keep_alive_while_waiting(server, monkeypatch):
    monkeypatch.setattr(app.server, "KEEP_ALIVE_S", 0.02)
    body, lines = {"prompt": "the", "max_tokens": 1, "stream": True}, []
    with (
        holding(server.host) as released,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as got,
    ):
        for line in got.iter_lines():
            lines.append(line)
            if line == ": computing":
                released.set()
    assert ": computing" in lines
    assert lines[-2:] == ["data: [DONE]", ""]


def test_an_error_in_mid_stream_is_an_error(client, server, monkeypatch):
    model = server.host.running.session.target.model
    for error, code in ((torch.OutOfMemoryError("no room"), "out_of_memory"), (OSError("disk gone"), "internal_error")):
        passes = []

        def fail(*_, passes=passes, error=error):
            passes.append(1)
            if len(passes) > 3:
                raise error

        handle = model.model.layers[0].register_forward_pre_hook(fail)
        try:
            with pytest.raises(openai.APIError) as raised:
                for _ in ask(client, stream=True, max_tokens=100, temperature=2):
                    pass
            assert raised.value.code == code
            passes.extend([1] * 5)
            with pytest.raises(openai.APIStatusError):
                ask(client)
        finally:
            handle.remove()
    assert ask(client).choices[0].message.content


def test_a_full_queue_says_so(chat_model, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path))
    with served(chat_model, max_waiting=1, api_key="secret") as running:
        hold = threading.Event()
        layer = running.host.running.session.target.model.model.layers[0]
        layer.register_forward_pre_hook(lambda *_: hold.wait(120) and None)
        url, key = f"{running.url}/v1/completions", {"authorization": "Bearer secret"}
        assert httpx.post(url, json={"prompt": "x"}).status_code == 401
        assert httpx.post(url, json={"prompt": "x"}, headers={"authorization": "Bearer no"}).status_code == 401
        assert httpx.get(f"{running.url}/health").status_code == 200
        with ThreadPoolExecutor(2) as pool:
            body = {"prompt": "x", "max_tokens": 1}
            worker, pending = running.host.worker, []
            for waiting in range(2):  # one after the other: the queue's one place must be free for the second
                pending.append(pool.submit(httpx.post, url, json=body, headers=key, timeout=120))
                until(lambda: (worker.num_running, worker.num_waiting) == (1, waiting))  # noqa: B023
            full = httpx.post(url, json=body, headers=key, timeout=120)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            hold.set()
            assert [each.result().status_code for each in pending] == [200, 200]


def test_a_stop_ends_answers_with_an_error_and_leaves_no_thread(chat_model, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path))
    before = own_threads()
    with served(chat_model) as running:
        layer = running.host.running.session.target.model.model.layers[0]
        layer.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        lines = []
        with httpx.stream(
            "POST", f"{running.url}/v1/completions", json={"prompt": "x", "stream": True, "temperature": 2}, timeout=120
        ) as got:
            for line in got.iter_lines():
                lines.append(line)
                running.server.ask_to_end()
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "stopped"
        assert "data: [DONE]" not in lines
    until(lambda: own_threads() <= before)


def test_while_loading_it_says_how_far(chat_model, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path))
    hold = threading.Event()

    def held(*args, progress, **options):
        progress(1, 4)
        hold.wait(20)
        return real(*args, progress=progress, **options)

    import app.launch

    real = app.launch.load_model
    monkeypatch.setattr(app.launch, "load_model", held)
    with served(chat_model, wait=False) as running:
        until(lambda: httpx.get(f"{running.url}/health").json().get("phase") == "load")
        answer = httpx.get(f"{running.url}/health")
        said = answer.json()
        assert (answer.status_code, said["status"], said["progress"]) == (503, "loading", 0.25)
        assert said["left_s"] >= 0
        refused = httpx.post(f"{running.url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        hold.set()
        until(lambda: httpx.get(f"{running.url}/health").status_code == 200)


def test_a_mixed_load_with_disconnects(server):
    """Marker prompts: nobody gets another's answer, nothing is left behind."""
    worker = server.host.worker
    markers = [f"marker {number} the cat" for number in range(6)]
    url = f"{server.url}/v1/completions"
    with httpx.Client(timeout=180) as http:
        expected = {
            each: http.post(url, json={"prompt": each, "max_tokens": 12, "temperature": 0}).json()["choices"][0]["text"]
            for each in markers
        }
        assert len(set(expected.values())) > 1
    threads = own_threads()
    done = {"whole": 0, "streamed": 0, "left": 0}

    def client_of(number):
        rng = random.Random(number)
        with httpx.Client(timeout=180) as http:
            for _ in range(13):
                marker, kind = rng.choice(markers), rng.choice(["whole", "streamed", "left"])
                body = {"prompt": marker, "max_tokens": 12, "temperature": 0, "stream": kind != "whole"}
                if kind == "whole":
                    assert http.post(url, json=body).json()["choices"][0]["text"] == expected[marker]
                else:
                    text = ""
                    with http.stream("POST", url, json=body) as got:
                        for line in got.iter_lines():
                            if kind == "left" and rng.random() < 0.4:
                                break
                            if line.startswith("data: {"):
                                text += json.loads(line[6:])["choices"][0]["text"]
                        else:
                            assert text == expected[marker]
                done[kind] += 1

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client_of, range(16)))
    assert sum(done.values()) == 16 * 13
    until(lambda: worker.num_running + worker.num_waiting == 0)
    until(lambda: own_threads() <= threads)


def own_threads():
    """Those alive, without the pools that the event loop keeps for later."""
    return {each for each in threading.enumerate() if not each.name.startswith(("asyncio", "AnyIO"))}


def test_nobody_else_is_let_in_without_a_key(chat_model, capsys):
    assert main(["serve", "--host", "0.0.0.0", "--target", str(chat_model), "--no-ui"]) == 1
    assert "set a key with --api-key" in capsys.readouterr().err


def test_a_taken_port_is_said(chat_model, capsys, server):
    port = server.url.rpartition(":")[2]
    assert main(["serve", "--port", port, "--target", str(chat_model), "--no-ui"]) == 1
    assert f"port {port}" in capsys.readouterr().err


def test_the_command_ends_on_a_signal_and_leaves_nothing(chat_model, tmp_path):
    """No orphan, no traceback; what ran gets its error."""
    command = [sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())", "serve", "--no-ui"]
    command += ["--port", "0", "--target", str(chat_model), "--draft", "none", "--dtype", "float32", "--ctx", "256"]
    environment = {**os.environ, "SPECEXEC_CACHE": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as child:
        url = re.search(r"http://[\d.:]+", child.stderr.readline())[0]
        with httpx.Client(base_url=url, timeout=120) as opened:
            until(lambda: opened.get("/health").status_code == 200, timeout_s=120)
            assert opened.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=120)[1]
    assert (child.returncode, said) == (130, "specexec: interrupted\n")


def test_a_model_that_cannot_be_loaded_ends_the_command(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert main(["serve", "--port", "0", "--target", str(tmp_path / "model"), "--no-ui", "--offline"]) == 1
    assert "config.json" in capsys.readouterr().err.splitlines()[-1]
