"""The chat as a person meets it: under a pseudo-terminal, over a pipe, on poor consoles."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.cli import main
from app.conversation import Conversation

ROOT = Path(__file__).parent.parent
SLOW = ["-c", f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import slow_chat"]
QUICK = ["-c", "import sys; from app.cli import main; sys.exit(main())"]
OPTIONS = ["--draft", "none", "--dtype", "float32", "--ctx", "256", "--max-tokens", "40", "--min-tokens", "40",
           "--seed", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return {
        **os.environ,
        "SPECEXEC_CACHE": str(tmp_path_factory.mktemp("cache")),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }


@pytest.fixture
def spawn(chat_model, environment):
    pexpect = pytest.importorskip("pexpect", reason="pexpect needs pseudo-terminals")
    spawned = []

    def start(code=SLOW, *, columns=80, **changes):
        child = pexpect.spawn(
            sys.executable, [*code, "chat", "--target", str(chat_model), *OPTIONS], cwd=str(ROOT), timeout=120,
            env={**environment, **changes}, dimensions=(24, columns), encoding="utf-8", codec_errors="replace",
        )  # fmt: skip
        spawned.append(child)
        return child

    yield start
    for child in spawned:
        child.close(force=True)


def ready(child):
    child.expect(">>>")
    time.sleep(0.2)


def left(child):
    child.read()
    child.close()
    return child.exitstatus if child.signalstatus is None else -child.signalstatus


def test_interrupts_stop_the_answer_and_keep_the_conversation(spawn, tmp_path):
    child = spawn()
    ready(child)
    child.sendintr()
    child.expect("Ctrl-D or /bye leaves")
    ready(child)
    child.send("first\r")
    child.expect(r"\(prefill\)")
    child.sendintr()  # not one token has come
    child.expect("stopped")
    ready(child)
    child.send("second\r")
    child.expect(r"\(prefill\)\r\n[\r\n]*[^\r\n]")
    child.sendintr()  # in mid-answer
    child.expect("stopped")
    ready(child)
    child.send(f"/save {tmp_path / 'kept.json'}\r")
    child.expect("saved")
    ready(child)
    child.sendeof()
    assert left(child) == 0
    turns = json.loads((tmp_path / "kept.json").read_text())["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
    assert turns[1]["content"] == ""
    assert turns[3]["content"]


def test_pasted_lines_quotes_a_narrow_console_and_a_kill(spawn, tmp_path):
    child = spawn(QUICK, columns=20)
    ready(child)
    child.send("\x1b[200~one\ntwo\x1b[201~\r")
    child.expect(r"40 tokens \|")
    ready(child)
    child.send('"""three\r')
    child.expect(r"\.\.\.")
    child.send('four"""\r')
    child.expect(r"40 tokens \|")
    ready(child)
    child.send(f"/save {tmp_path / 'kept.json'}\r")
    child.expect("saved")
    ready(child)
    child.kill(signal.SIGTERM)
    assert left(child) in (-signal.SIGTERM, 128 + signal.SIGTERM)
    turns = json.loads((tmp_path / "kept.json").read_text())["messages"]
    assert [turn["content"] for turn in turns[::2]] == ["one\ntwo", "three\nfour"]


def test_a_signal_while_loading_ends_it(chat_model, environment):
    hold = "lambda *_, **__: print('loading', flush=True) or time.sleep(60)"
    script = (
        "import sys, time; from app.quiet import quiet_libraries; quiet_libraries(); import app.launch; "
        f"app.launch.load_model = {hold}; from app.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script, "chat", "--target", str(chat_model), *OPTIONS]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    children = {
        number: subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    for number, child in children.items():
        assert child.stdout.readline() == "loading\n"
        child.send_signal(number)
    ends = {number: (child.communicate(timeout=120)[1], child.returncode) for number, child in children.items()}
    assert ends[signal.SIGTERM] == ("", -signal.SIGTERM)
    assert ends[signal.SIGINT] == ("specexec: interrupted\n", 130)


def piped(chat_model, environment, monkeypatch, text, encoding="utf-8"):
    """Code, standard output and standard error of a chat whose input is `text`."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setenv("SPECEXEC_CACHE", environment["SPECEXEC_CACHE"])
        patch.setattr("sys.stdin", io.StringIO(text))
        patch.setattr("sys.stdout", streams[0])
        patch.setattr("sys.stderr", streams[1])
        code = main(["chat", "--target", str(chat_model), *OPTIONS])
    for stream in streams:
        stream.flush()
    return code, *(stream.buffer.getvalue().decode(encoding) for stream in streams)


def test_over_a_pipe_with_every_command(chat_model, environment, monkeypatch, tmp_path):
    kept = tmp_path / "kept.json"
    commands = ["/stats", "/nope", "/set temp -1", "/set tmp 1", "/retry", "the cat", "/stats", "/set top-p=0.9",
                "/set temp = 0.7", "/set stop a=b c", "/set", "/retry",
                "/system You are é.", f"/save {kept}", "/clear", f"/load {kept}",
                f"/load {tmp_path}",
                "/help", "/bye", "never asked"]  # fmt: skip
    code, out, said = piped(chat_model, environment, monkeypatch, "\n".join(commands))
    assert code == 0
    for words in ("temp 0.7", "top_p 0.9", "stop ('a=b c',)", "prompt ", "/bye", "computed before"):
        assert words in out
    for words in ("nothing has been answered", "no command /nope", "temp must be 0 (greedy)", "did you mean temp",
                  "nothing has been asked", "2 messages from",
                  "top_p (/set) has no effect at temperature 0"):  # fmt: skip
        assert words in said
    assert said.count("40 tokens |") == 2
    assert json.loads(kept.read_text(encoding="utf-8"))["messages"][0] == {"role": "system", "content": "You are é."}


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_poor_consoles_get_question_marks(chat_model, environment, monkeypatch, encoding):
    code, out, _ = piped(chat_model, environment, monkeypatch, "the cat\n", encoding)
    assert (code, "?" in out) == (0, True)


def test_a_reader_that_leaves_is_no_error(chat_model, environment):
    command = f"printf 'a\\nb\\nc\\n' | {sys.executable} {QUICK[0]} '{QUICK[1]}' chat --target {chat_model} "
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {' '.join(OPTIONS)} | head -c 1"],
        cwd=ROOT, env=environment, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


def test_a_file_that_is_no_conversation_is_named(tmp_path):
    turns = ('[{"role": 1}]', '[{"role": "user", "content": 5}]', '[{"role": "tool", "content": "x"}]', "[5]", "{}",
             '[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]')  # fmt: skip
    for content in ("{", "[]", *(f'{{"messages": {each}}}' for each in turns)):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match=r"x\.json is not a saved conversation"):
            Conversation.load(tmp_path / "x.json")
