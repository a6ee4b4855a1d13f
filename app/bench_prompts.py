"""Benchmark questions: the package's own, or a file, folder or data set in the format of SPEED-Bench and Spec-Bench."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from app import hub

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(/[\w.-]+)?")
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # what SPEED-Bench has in place of texts it may not pass on


@dataclass(frozen=True)
class Question:
    """What is asked, in one or more turns; the model's own answers stand between them."""

    question_id: str
    category: str
    turns: tuple[str, ...]


def read_questions(source: str | None, *, offline: bool = False) -> list[Question]:
    """Questions of {"question_id", "category", "turns"}; None: the package's own.

    source: a JSONL file, a parquet file, a folder of parquet files, or a Hub data set as owner/name or owner/name/part
    (nvidia/SPEED-Bench/qualitative). Raises FileNotFoundError, ConnectionError, or ValueError with what is wrong where.
    """
    if source is None:
        return list(_from_lines(resources.files("configs") / "bench.jsonl"))
    path = Path(source).expanduser()
    if not path.exists() and _HUB_ID.fullmatch(source):
        owner, name, *part = source.split("/")
        path = hub.dataset(f"{owner}/{name}", part[0] if part else None, offline=offline)
    if not path.exists():
        raise FileNotFoundError(f"no questions at {source!r}: neither a file, nor a folder, nor a data set's Hub id")
    questions = list(_from_tables(_tables(path)) if path.is_dir() or path.suffix == ".parquet" else _from_lines(path))
    if not questions:
        raise ValueError(f"{source} has no questions")
    if absent := sum(any(_PLACEHOLDER in turn for turn in question.turns) for question in questions):
        raise ValueError(
            f"{absent} of the {len(questions)} questions of {source} are placeholders: fill them with SPEED-Bench's "
            "own prepare_data.py (in Model-Optimizer's examples/specdec_bench) and give the folder that it writes"
        )
    name, count = Counter(question.question_id for question in questions).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{source} has {count} questions {name!r}: every question_id must be another one")
    return questions


def stratified(questions: Sequence[Question], number: int | None) -> list[Question]:
    """The first `number` questions when categories take turns, in order of appearance; all of them for None."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    rounds = zip_longest(*by_category.values())
    return [question for each in rounds for question in each if question is not None][:number]


def _from_lines(file: Path | Traversable) -> Iterator[Question]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from error
            yield _question(record, f"{file}, line {number}")


def _tables(path: Path) -> list[Path]:
    """The parquet files at `path`; ValueError where they belong to several parts of a data set."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    folders = sorted({file.parent for file in files})
    if len(folders) > 1:
        parts = ", ".join(folder.relative_to(path).as_posix() for folder in folders)
        raise ValueError(f"{path} has several parts, {parts}: name one of them, as {path}/{folders[0].name}")
    return files


def _from_tables(files: Sequence[Path]) -> Iterator[Question]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import read_table
    except ImportError:
        raise ValueError("parquet files need pyarrow: pip install 'specexec[parquet]'") from None
    for file in files:
        try:
            rows = read_table(file).to_pylist()
        except ArrowInvalid as error:
            raise ValueError(f"{file} is not readable parquet: {error}") from error
        for number, record in enumerate(rows, start=1):
            yield _question(record, f"{file}, row {number}")


def _question(record: Any, where: str) -> Question:
    try:
        turns = tuple(record["turns"])
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise ValueError("turns must be a list of texts")
        return Question(str(record["question_id"]), str(record["category"]), turns)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: {error}; it must have question_id, category and turns") from error
