"""Benchmark questions: the package's own, or a file in the format of SPEED-Bench and Spec-Bench."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path


@dataclass(frozen=True)
class Question:
    """What is asked, in one or more turns; the model's own answers stand between them."""

    question_id: str
    category: str
    turns: tuple[str, ...]


def read_questions(file: Path | None) -> list[Question]:
    """The questions of a JSONL file of {"question_id", "category", "turns"}; None: the package's own.

    Raises FileNotFoundError, or ValueError with the line that is wrong.
    """
    source = file or resources.files("configs") / "bench.jsonl"
    questions = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            turns = tuple(record["turns"])
            if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
                raise ValueError("turns must be a list of texts")
            questions.append(Question(str(record["question_id"]), str(record["category"]), turns))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{source}, line {number}: {error}; each line is an object with question_id, category and turns"
            ) from error
    if not questions:
        raise ValueError(f"{source} has no questions")
    return questions


def stratified(questions: Sequence[Question], number: int | None) -> list[Question]:
    """The first `number` questions when categories take turns, in order of appearance; all of them for None."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    rounds = zip_longest(*by_category.values())
    return [question for each in rounds for question in each if question is not None][:number]
