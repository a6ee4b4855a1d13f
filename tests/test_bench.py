"""The benchmark: SPEED-Bench's metrics by hand, own prompts, a run that is interrupted and goes on, its report."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import eagles
import httpx
import pytest
import tiny
from serving import served
from test_heads import written
from tiny_tokenizer import tiny_tokenizer

from app.bench_metrics import Request, acceptance, timing, without_end
from app.bench_prompts import read_questions, stratified
from app.bench_report import draw, markdown, summary
from app.cli import main

LOG = {
    # chunks 1 3 2 | 4: AL 10 / 4 = 2.5
    "a": Request("coding", ((1, 3, 2), (4,)), ((0.0, 1.0, 2.0, 4.0), (4.0, 5.0))),
    # chunks 1 1: AL 1
    "b": Request("coding", ((1, 1),), ((10.0, 12.0, 13.0),)),
    # chunks 2 4: AL 3
    "c": Request("math", ((2, 4),), ((20.0, 20.5, 21.5),)),
}


def test_acceptance_metrics_by_hand() -> None:
    found = acceptance(LOG)
    assert found["Request_AL"] == {"a": 2.5, "b": 1.0, "c": 3.0}
    assert found["Category_AL"] == {"coding": 1.75, "math": 3.0}
    assert found["Average_AL"] == pytest.approx(6.5 / 3)  # over requests, not chunks (18 / 8) or categories
    assert found["Acceptance_Length_Histogram"] == {1: 3, 2: 2, 3: 1, 4: 2}
    assert found["Joint_Acceptance_Rate"] == {1: 1.0, 2: 5 / 8, 3: 3 / 8, 4: 2 / 8}
    assert found["Conditional_Acceptance_Rate"] == pytest.approx({1: 1.0, 2: 5 / 8, 3: 3 / 5, 4: 2 / 3})


def test_lengths_that_do_not_occur_are_skipped() -> None:
    found = acceptance({"a": Request("x", ((1, 5, 5, 1),), ((0, 1, 2, 3, 4),))})
    assert found["Joint_Acceptance_Rate"] == {1: 1.0, 5: 0.5}
    assert found["Conditional_Acceptance_Rate"] == {1: 1.0, 5: 0.5}


def test_timing_metrics_by_hand() -> None:
    found = timing(LOG)
    assert found["Output TPS"] == pytest.approx(18 / 21.5)
    assert found["TTFT Time"] == {
        "min": "0.5000",
        "max": "2.0000",
        "mean": "1.1250",  # 1, 1, 2, 0.5
        "std": "0.5449",  # sqrt((0.0156 * 2 + 0.7656 + 0.3906) / 4)
        "quantile_0.25": "0.8750",
        "quantile_0.5": "1.0000",
        "quantile_0.75": "1.2500",
    }
    # a's first turn (6 - 1) / 3, b (2 - 1) / 1, c (6 - 1) / 1; a's second turn has one chunk and no rate
    assert found["Request Generation TPS"]["mean"] == f"{(5 / 3 + 1 + 5) / 3:.4f}"
    assert found["Request Generation Step Time"]["mean"] == "1.1875"  # 1 1 2 1 2 1 0.5 1: 9.5 / 8
    assert found["E2E Request Time"]["max"] == "4.0000"
    assert timing({}) == {}


@pytest.mark.parametrize(
    ("lengths", "ended", "expected"),
    [([3, 2], True, (3, 1)), ([3, 1], True, (3,)), ([3, 2], False, (3, 2)), ([], True, ()), ([1], True, ())],
)
def test_the_end_token_does_not_count(lengths: list[int], ended: bool, expected: tuple[int, ...]) -> None:
    assert without_end(lengths, ended=ended) == expected


def test_own_prompts_are_a_dozen_in_each_category() -> None:
    questions = read_questions(None)
    assert set(Counter(question.category for question in questions).values()) == {12}
    assert len({question.category for question in questions}) == 11
    assert len({question.question_id for question in questions}) == 132
    few = stratified(questions, 13)
    assert len({question.category for question in few}) == 11 and few[0].category == few[11].category


def test_two_questions_of_one_id_are_refused(tmp_path: Path) -> None:
    (file := tmp_path / "prompts.jsonl").write_text('{"question_id": 1, "category": "x", "turns": ["y"]}\n' * 2)
    with pytest.raises(ValueError, match="2 questions '1'"):
        read_questions(str(file))


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"category": "x", "turns": ["y"]}', '{"question_id": 1, "category": "x", "turns": []}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"question_id": 1, "category": "x", "turns": ["y"]}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read_questions(str(file))


ROWS = [
    {"question_id": "a", "category": "coding", "turns": ["x", "y"], "source": "own"},
    {"question_id": "b", "category": "math", "turns": ["z"], "source": "own"},
]


def write_parquet(file: Path, rows: list[dict]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def test_speed_bench_is_read_from_parquet(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "speed" / "qualitative" / "test.parquet", ROWS)
    for source in (file, file.parent, tmp_path):
        questions = read_questions(str(source))
        assert [(each.question_id, each.category, each.turns) for each in questions] == [
            ("a", "coding", ("x", "y")),
            ("b", "math", ("z",)),
        ]
    write_parquet(tmp_path / "speed" / "throughput_1k" / "test.parquet", ROWS)
    with pytest.raises(ValueError, match="several parts, speed/qualitative, speed/throughput_1k: name one"):
        read_questions(str(tmp_path))
    file.write_bytes(b"PAR1 is not enough")
    with pytest.raises(ValueError, match="not readable parquet"):
        read_questions(str(file))
    write_parquet(file, [{"question_id": "a", "category": "math", "turns": []}])
    with pytest.raises(ValueError, match="row 1: turns must be"):
        read_questions(str(file))


def test_placeholders_are_refused(tmp_path: Path) -> None:
    held_back = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    file = write_parquet(tmp_path / "test.parquet", [*ROWS, {**ROWS[0], "turns": [held_back]}])
    with pytest.raises(ValueError, match="1 of the 3 questions.*placeholders.*prepare_data"):
        read_questions(str(file))


def test_a_hub_data_set_is_read_from_the_cache(tmp_path: Path) -> None:
    """In a process of its own: the Hub's library reads HF_HOME when it is imported."""
    snapshot = tmp_path / "hub" / "datasets--some--set" / "snapshots" / "0123"
    write_parquet(snapshot / "qualitative" / "test-00000-of-00001.parquet", ROWS)
    write_parquet(snapshot / "throughput_1k" / "test-00000-of-00001.parquet", ROWS[:1])
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    script = (
        "from app.bench_prompts import read_questions\n"
        "print(len(read_questions('some/set/qualitative', offline=True)))\n"
        "for source in ('some/set', 'other/set', 'some/set/nothing', 'nowhere'):\n"
        "    try:\n"
        "        read_questions(source, offline=True)\n"
        "    except (OSError, ValueError) as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    whole, *errors = done.stdout.splitlines()
    assert whole == "2"
    assert "several parts, qualitative, throughput_1k" in errors[0]
    assert errors[1] == "ConnectionError other/set is not cached and this run is offline: fetch it first"
    assert errors[2].startswith("FileNotFoundError some/set has no folder 'nothing'")
    assert errors[3].startswith("FileNotFoundError no questions at 'nowhere'")


def test_a_run_is_resumed_and_reported(chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text(
        '{"question_id": "q1", "category": "coding", "turns": ["the cat", "and the dog"]}\n'
        '{"question_id": "q2", "category": "math", "turns": ["one two"]}\n'
    )
    options = [*("--target", str(chat_model), "--dtype", "float32", "--ctx", "256", "--max-tokens", "8", "--json")]
    options += ["--drafts", "ngram,suffix", "--budgets", "4,auto", "--vs", "none", "--out", str(out)]
    assert main(["bench", str(prompts), *options]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cell["draft"], cell["budget"]) for cell in results["cells"]] == [
        *[("none", "auto"), ("ngram", 4), ("ngram", "auto"), ("suffix", 4), ("suffix", "auto")]
    ]
    lines = (out / "log.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 5 * 3
    answers = {(record["question_id"], record["turn"], record["answer"]) for record in map(json.loads, lines[1:])}
    assert len(answers) == 3  # the same text with every draft and budget
    assert "| none | auto |" in (out / "results.md").read_text()
    (out / "log.jsonl").write_text("\n".join(lines[:9]) + '\n{"draft": "sel')
    assert main(["bench", str(prompts), *options]) == 0
    assert (out / "log.jsonl").read_text().splitlines()[:9] == lines[:9]
    assert len((out / "log.jsonl").read_text().splitlines()) == 1 + 5 * 3
    assert main(["bench", str(prompts), *options, "--seed", "5"]) == 1
    assert "belongs to other questions or settings" in capsys.readouterr().err


TWO_TURNS = '{"question_id": "q1", "category": "coding", "turns": ["the cat", "and the dog"]}\n'


@pytest.fixture
def bench(chat_model: Path, tmp_path: Path) -> tuple[list[str], Path]:
    """The arguments of a small run and where its log is."""
    (tmp_path / "prompts.jsonl").write_text(TWO_TURNS)
    options = ["--target", str(chat_model), "--dtype", "float32", "--ctx", "256", "--max-tokens", "6"]
    out = tmp_path / "out"
    return ["bench", str(tmp_path / "prompts.jsonl"), *options, "--out", str(out)], out / "log.jsonl"


def test_a_question_half_done_is_asked_again_once(bench: tuple[list[str], Path]) -> None:
    arguments, log = bench
    arguments += ["--drafts", "none"]
    assert main(arguments) == 0
    head, first, _ = log.read_text().splitlines()
    log.write_text(f"{head}\n{first}\n")  # interrupted after the first turn
    assert main(arguments) == 0
    lines = log.read_text().splitlines()
    assert [json.loads(line)["turn"] for line in lines[1:]] == [0, 1]
    assert main(arguments) == 0
    assert log.read_text().splitlines() == lines, "nothing was left to ask"
    log.write_text("\n".join([head, first, *lines[1:]]) + "\n")  # counted twice
    assert main(arguments) == 0
    assert [json.loads(line)["turn"] for line in log.read_text().splitlines()[1:]] == [0, 1]
    assert [file.name for file in log.parent.glob("*.partial")] == []


def test_a_damaged_log_is_named(bench: tuple[list[str], Path], capsys: pytest.CaptureFixture) -> None:
    arguments, log = bench
    assert main([*arguments, "--drafts", "none"]) == 0
    lines = log.read_bytes().splitlines()
    for number in (1, 2):
        for line in (b"", b"{", b"[1]", b"5", b"{}", b"\xff"):
            spoilt = b"\n".join([*lines[: number - 1], line, *lines[number:], b""])
            log.write_bytes(spoilt)
            assert main([*arguments, "--drafts", "none"]) == 1
            assert f"{log}, line {number}: not " in capsys.readouterr().err.splitlines()[-1]
            assert log.read_bytes() == spoilt


def test_stop_ends_the_answers(bench: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments, log = bench
    arguments += ["--max-tokens", "40", "--min-tokens", "40", "--draft", "none"]
    assert main(arguments) == 0
    answer = json.loads(log.read_text().splitlines()[1])["answer"]
    stop = ["--stop", answer[4:6]]
    assert main([*arguments, *stop, "--out", str(tmp_path / "other")]) == 0
    stopped = json.loads((tmp_path / "other" / "log.jsonl").read_text().splitlines()[1])
    assert stopped["answer"] == answer.partition(answer[4:6])[0]
    capsys.readouterr()
    own = arguments[arguments.index("--target") : arguments.index("--out")]
    assert main(["run", "the cat", *own, "--max-tokens", "40", "--min-tokens", "40", *stop, "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert sum(stopped["lengths"]) == tokens < 40, "what completed the stop text is no end-of-text token: it counts"


def test_stop_is_passed_on_to_another_server(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"question_id": 1, "category": "x", "turns": ["the cat"]}\n')
    with served(chat_model) as running:

        def generated() -> float:
            return float(re.search(r"generated_tokens_total ([\d.]+)", httpx.get(f"{running.url}/metrics").text)[1])

        body = {"messages": [{"role": "user", "content": "the cat"}], "temperature": 0, "min_tokens": 40}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json={**body, "max_tokens": 40}, timeout=60).json()
        before, text = generated(), answer["choices"][0]["message"]["content"]
        options = ["--engine", f"{running.url}/v1", "--min-tokens", "40", "--max-tokens", "40", "--stop", text[2:4]]
        assert main(["bench", str(tmp_path / "prompts.jsonl"), *options, "--out", str(tmp_path)]) == 0
        assert 0 < generated() - before < before == 40


def test_past_on_is_refused(bench: tuple[list[str], Path], capsys: pytest.CaptureFixture) -> None:
    arguments, log = bench
    assert main([*arguments, "--draft", "suffix", "--past", "on"]) == 1
    assert "--past on has no effect on a benchmark" in capsys.readouterr().err
    assert main([*arguments, "--draft", "suffix", "--past", "off", "--budget", "4"]) == 0
    assert log.exists()


def test_a_learned_draft_takes_no_flags_of_a_draft_model(
    bench: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Alone it refuses them; beside a draft model that they are for it does not."""
    arguments, log = bench
    head = str(written(tmp_path / "head", *eagles.stored("another width")[:2]))
    draft = str(tiny.save(tiny.tiny_model("llama", seed=9), tmp_path / "draft"))
    tiny_tokenizer().save_pretrained(draft)
    for flag, value in (("--draft-bits", "4"), ("--draft-ctx", "8"), ("--draft-dtype", "bfloat16")):
        assert main([*arguments, "--draft", head, flag, value, "--out", str(tmp_path / flag)]) == 1
        assert f"{flag} has no effect on {head}, a learned draft" in capsys.readouterr().err
    assert main([*arguments, "--draft", draft, "--drafts", f"{draft},{head}", "--draft-bits", "4"]) == 0
    assert {json.loads(line)["draft"] for line in log.read_text().splitlines()[1:]} == {draft, head}


def test_baselines_are_cells_like_others(chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"question_id": "q1", "category": "coding", "turns": ["the cat"]}\n')
    options = [*("--target", str(chat_model), "--dtype", "float32", "--ctx", "256", "--max-tokens", "12", "--json")]
    options += ["--drafts", "self,chain,specinfer,specexec,none", "--budgets", "9", "--vs", "none", "--out", str(out)]
    assert main(["bench", str(prompts), *options]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    cells = {(cell["draft"], cell["budget"]): cell for cell in results["cells"]}
    assert set(cells) == {
        *((draft, 9) for draft in ("self", "chain", "specinfer", "specexec")),
        ("none", "auto"),
    }
    answers = {record["answer"] for record in map(json.loads, (out / "log.jsonl").read_text().splitlines()[1:])}
    assert len(answers) == 1  # greedy text is that of plain decoding, with the sampling methods too
    for (draft, budget), cell in cells.items():
        longest = max(map(int, cell["acceptance"]["Acceptance_Length_Histogram"]))
        deepest = {"none": 0, "specinfer": 3}.get(draft, budget)
        assert 1 <= longest <= 1 + deepest, (draft, budget)
        assert cell["guidelines"]["regime"] in ("memory", "latency", "attention", "compute")
        assert set(cell["guidelines"]["draft_length"]) == {"gemm", "attention", "tiles", "latency"}
    assert cells["chain", 9]["tokens_per_pass"] > 1.5  # a 4-bit copy is right now and then
    assert cells["none", "auto"]["speedup"] == 1.0
    assert "draft length by guideline: gemm " in (out / "results.md").read_text()


def test_a_baseline_without_a_model_is_refused(chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = ["--target", str(chat_model), "--draft", "none", "--drafts", "teapot", "--out", str(tmp_path / "out")]
    assert main(["bench", *options]) == 1
    assert "no model 'teapot'" in capsys.readouterr().err


SITUATION = {
    "regime": "memory",
    "seconds": {"link": 0.0, "memory": 0.5, "latency": 0.2},
    "ctx": 64,
    "budget": 16,
    "full_rows": 200,
    "group_size": 8,
    "num_layers": 4,
    "layer_ratio": 0.3,
    "link_nodes": None,
}


def test_speed_up_is_paired_by_question() -> None:
    """2 and 8 times as fast on two questions of unequal length: 4 times by the geometric mean, whatever the lengths."""
    parts = {"category": "x", "turn": 0, "draft_s": 0.0, "link_s": 0.0, "verify_s": 1.0, "situation": SITUATION}
    records = [
        {**parts, "draft": "none", "budget": "auto", "question_id": "p", "lengths": [1, 1], "times": [0.0, 1.0, 2.0]},
        {**parts, "draft": "none", "budget": "auto", "question_id": "q", "lengths": [1] * 8, "times": [0.0, 9.0, 16.0]},
        {**parts, "draft": "self", "budget": 4, "question_id": "p", "lengths": [1, 1], "times": [0.0, 0.5, 1.0]},
        {**parts, "draft": "self", "budget": 4, "question_id": "q", "lengths": [4, 4], "times": [0.0, 1.0, 2.0]},
    ]
    plain, drafted = summary(records, "none")["cells"]
    assert plain["speedup"] == pytest.approx(1.0)
    assert drafted["speedup"] == pytest.approx(4.0)
    assert drafted["speedup_quartiles"] == pytest.approx([3.5, 5.0, 6.5])
    # Lengths 1, 1, 4, 4: AL(D) is 1, 1.5, 2, 2.5. At 0.3 a guess 1.5 / 1.3 and 2 / 1.6 rise; 2.5 / 1.9 does too: D = 3.
    assert drafted["guidelines"]["draft_length"]["latency"] == 3
    assert plain["guidelines"]["draft_length"]["latency"] == 0


def records_of(*cells: tuple[str, int | str, float]) -> list[dict]:
    """One question of 8 tokens in each cell of (draft, budget, seconds)."""
    parts = {"category": "x", "turn": 0, "draft_s": 0.0, "link_s": 0.0, "verify_s": 1.0, "situation": SITUATION}
    parts |= {"question_id": "q", "lengths": [8]}
    return [{**parts, "draft": draft, "budget": budget, "times": [0.0, s]} for draft, budget, s in cells]


def test_speed_up_is_against_the_budget_auto() -> None:
    cells = summary(records_of(("self", 16, 8.0), ("self", "auto", 2.0), ("none", "auto", 4.0)), "self")["cells"]
    assert [cell["speedup"] for cell in cells] == pytest.approx([0.25, 1.0, 0.5])


def test_no_speed_up_where_nothing_was_emitted(tmp_path: Path) -> None:
    records = [{**each, "lengths": [], "times": [0.0]} for each in records_of(("none", "auto", 1.0), ("self", 4, 1.0))]
    results = summary(records, "none")
    assert all("speedup" not in cell and "speedup_quartiles" not in cell for cell in results["cells"])
    assert "| self | 4 | 0.00 | 0.00 | 0.00 |  |" in markdown(results)
    assert len(draw(results, tmp_path)) == 4


def test_plots(tmp_path: Path) -> None:
    record = {"question_id": "q", "category": "x", "turn": 0, "lengths": [1, 3], "times": [0.0, 1.0, 2.0]}
    record |= {"draft_s": 0.5, "link_s": 0.5, "verify_s": 1.0, "situation": SITUATION}
    records = [{**record, "draft": draft, "budget": budget} for draft, budget in (("self", 16), ("none", "auto"))]
    results = summary(records, "none")
    assert results["cells"][0]["speedup"] == pytest.approx(1.0)
    assert "| self | 16 | 2.00 |" in markdown(results)
    files = draw(results, tmp_path)
    assert len(files) == 4 and all(file.read_bytes().startswith(b"\x89PNG") for file in files)
