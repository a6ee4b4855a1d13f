"""The benchmark: SPEED-Bench's metrics by hand, own prompts, a run that is interrupted and goes on, its report."""

import json
from collections import Counter
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"category": "x", "turns": ["y"]}', '{"question_id": 1, "category": "x", "turns": []}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"question_id": 1, "category": "x", "turns": ["y"]}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read_questions(file)


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


def test_plots(tmp_path: Path) -> None:
    record = {"question_id": "q", "category": "x", "turn": 0, "lengths": [1, 3], "times": [0.0, 1.0, 2.0]}
    record |= {"draft_s": 0.5, "link_s": 0.5, "verify_s": 1.0}
    records = [{**record, "draft": draft, "budget": budget} for draft, budget in (("self", 16), ("none", "auto"))]
    results = summary(records, "none")
    assert results["cells"][0]["speedup"] == 1.0
    assert "| self | 16 | 2.00 |" in markdown(results)
    files = draw(results, tmp_path)
    assert len(files) == 4 and all(file.read_bytes().startswith(b"\x89PNG") for file in files)
