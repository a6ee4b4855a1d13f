"""The command `bench`: questions over drafts and budgets, a line of log per turn, and what they add up to."""

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from app.advice import situation
from app.baselines import BASELINES, USUAL_NODES
from app.bench_metrics import without_end
from app.bench_prompts import Question, read_questions, stratified
from app.bench_report import draw, markdown, summary
from app.environment import is_offline
from app.launch import Running, open_session
from app.progress import Progress
from app.settings import DRAFT_KINDS, OF_A_DRAFT_MODEL, Resolved, Settings
from app.template import Message

_DEFAULT_MAX_TOKENS = 256
_WHERE = ("draft", "budget", "question_id")  # what a record of the log belongs to


def run_bench(
    chosen: Resolved,
    prompts: str | None,
    out: Path,
    *,
    drafts: Sequence[str],
    budgets: Sequence[int | None],
    versus: str | None,
    number: int | None,
    as_json: bool,
    offline: bool,
) -> int:
    """Answers every question with every draft and budget and writes log, results, table and plots into `out`.

    drafts: the settings' kinds, and BASELINES over the settings' own draft model (`self` where that names none).
    versus: a draft to compare each answer with, `none` as a rule. A run that was interrupted goes on where it stopped.
    Raises ValueError if `out` holds the log of other questions or settings, or one that is damaged.
    """
    if chosen.settings.past == "on" and chosen.origins.get("past") == "flag":
        raise ValueError("--past on has no effect on a benchmark: its drafts know nothing of earlier answers")
    offline = offline or is_offline()
    questions = stratified(read_questions(prompts, offline=offline), number)
    log = _Log(out / "log.jsonl", _identity(chosen.settings, questions), questions)
    cells = [(draft, budget) for draft in drafts for budget in (budgets if draft != "none" else (None,))]
    if versus is not None and (versus, None) not in cells:
        cells.insert(0, (versus, None))
    with Progress("bench", "turns") as progress:
        total = len(cells) * sum(len(question.turns) for question in questions)
        progress(len(log.records), total)
        for draft, budget in cells:
            missing = [question for question in questions if not log.has(draft, budget, question)]
            if not missing:
                continue
            with _opened(chosen, draft, budget, offline=offline) as running:
                for question in missing:
                    for record in _answers(running, question):
                        log.add({"draft": draft, "budget": budget or "auto", **record})
                        progress(len(log.records), total)
    results = summary(log.records, versus)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.md").write_text(markdown(results))
    draw(results, out)
    print(json.dumps(results) if as_json else markdown(results))
    _note(f"bench: written to {out}")
    return 0


def _opened(chosen: Resolved, draft: str, budget: int | None, *, offline: bool) -> AbstractContextManager[Running]:
    """A session for one cell; what earlier ones have said is not for its draft to know."""
    method = draft if draft in BASELINES else None
    if method is not None:
        own = chosen.settings.draft
        draft, budget = own if own not in DRAFT_KINDS else "self", budget or USUAL_NODES[method]
    settings, origins = replace(chosen.settings, draft=draft, budget=budget, past="off"), dict(chosen.origins)
    if draft != chosen.settings.draft:
        for key in OF_A_DRAFT_MODEL:  # not asked for here: they are for another of the drafts that are compared
            origins.pop(key, None)
    return open_session(replace(chosen, settings=settings, origins=origins), offline=offline, note=_note, method=method)


def _answers(running: Running, question: Question) -> Iterator[dict[str, Any]]:
    """Every turn of a question, with the model's own answers between: what was emitted when, and what it cost."""
    settings, session = running.chosen.settings, running.session
    where = asdict(situation(running.shape, running.choice, running.rates, session.ctx))
    messages: list[Message] = [{"role": "system", "content": settings.system}] if settings.system else []
    for turn, text in enumerate(question.turns):
        messages.append({"role": "user", "content": text})
        times, lengths, answer, before = [time.perf_counter()], [], [], 0
        chunks = session.stream(
            session.encode_chat(messages),
            running.sampling,
            max_tokens=settings.max_tokens or _DEFAULT_MAX_TOKENS,
            stop=settings.stop,
        )
        for chunk in chunks:
            times.append(time.perf_counter())
            lengths.append(chunk.stats.tokens - before)
            before = chunk.stats.tokens
            answer.append(chunk.text)
        stats = chunk.stats
        kept = without_end(lengths, ended=chunk.step.tokens[lengths[-1] - 1] in session.stop_ids)
        messages.append({"role": "assistant", "content": "".join(answer)})
        link_s = stats.streamed_bytes / running.raw_link_bps if running.raw_link_bps else 0.0
        yield {
            "question_id": question.question_id,
            "category": question.category,
            "turn": turn,
            "answer": "".join(answer),
            "lengths": kept,
            "times": times[: len(kept) + 1],
            "draft_s": stats.draft_s,
            "link_s": min(link_s, stats.verify_s),
            "verify_s": stats.verify_s,
            "draft_paused": stats.draft_paused,
            "situation": where,
        }


class _Log:
    """The answers so far, one JSON line each behind a line that says what the run is; survives an interruption.

    Of a question that was left half done nothing is kept: it is asked again.
    """

    def __init__(self, file: Path, identity: str, questions: Sequence[Question]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        num_turns = {question.question_id: len(question.turns) for question in questions}
        found = _read_log(file, identity)
        counts = Counter(map(_where, found))
        self.records = [each for each in found if counts[_where(each)] == num_turns.get(each["question_id"])]
        lines = [json.dumps({"identity": identity}), *map(json.dumps, self.records)]
        partial = file.with_name(file.name + ".partial")
        partial.write_text("".join(line + "\n" for line in lines))
        partial.replace(file)

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        with self._file.open("a") as stream:
            stream.write(json.dumps(record) + "\n")

    def has(self, draft: str, budget: int | None, question: Question) -> bool:
        """Whether all turns of `question` are there."""
        own = (draft, budget or "auto", question.question_id)
        return sum(_where(record) == own for record in self.records) == len(question.turns)


def _read_log(file: Path, identity: str) -> list[dict[str, Any]]:
    """The records of `file`, none where there is no such file; a last line that was cut short is left out."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    if not lines:
        return []
    head = _parsed(lines[0])
    if not isinstance(head, dict) or "identity" not in head:
        raise ValueError(f"{file}, line 1: not the beginning of a benchmark's log; choose another --out or remove it")
    if head["identity"] != identity:
        raise ValueError(f"{file} belongs to other questions or settings: choose another --out or remove it")
    if _parsed(lines[-1]) is None:
        del lines[-1]
    records = [_parsed(line) for line in lines[1:]]
    for number, record in enumerate(records, start=2):
        if not isinstance(record, dict) or not record.keys() >= set(_WHERE):
            raise ValueError(f"{file}, line {number}: not an answer; remove that line, and its question is asked again")
    return records


def _parsed(line: bytes) -> Any:
    """A line's JSON; None if it is none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _where(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[key] for key in _WHERE)


def _identity(settings: Settings, questions: Sequence[Question]) -> str:
    """A digest of what answers depend on: every setting but the kind of draft and the budget, and the questions."""
    model = settings.draft if settings.draft not in DRAFT_KINDS else "auto"
    same = asdict(replace(settings, draft=model, budget=None))
    text = json.dumps([same, [asdict(question) for question in questions]], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
