"""The command `bench`: questions over drafts and budgets, a line of log per turn, and what they add up to."""

import hashlib
import json
import sys
import time
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
from app.settings import DRAFT_KINDS, Resolved, Settings
from app.template import Message

_DEFAULT_MAX_TOKENS = 256


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
    Raises ValueError if `out` holds the log of other questions or settings.
    """
    offline = offline or is_offline()
    questions = stratified(read_questions(prompts, offline=offline), number)
    log = _Log(out / "log.jsonl", _identity(chosen.settings, questions))
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
    settings = replace(chosen.settings, draft=draft, budget=budget, past="off")
    return open_session(replace(chosen, settings=settings), offline=offline, note=_note, method=method)


def _answers(running: Running, question: Question) -> Iterator[dict[str, Any]]:
    """Every turn of a question, with the model's own answers between: what was emitted when, and what it cost."""
    settings, session = running.chosen.settings, running.session
    where = asdict(situation(running.shape, running.choice, running.rates, session.ctx))
    messages: list[Message] = [{"role": "system", "content": settings.system}] if settings.system else []
    for turn, text in enumerate(question.turns):
        messages.append({"role": "user", "content": text})
        times, lengths, answer, before = [time.perf_counter()], [], [], 0
        chunks = session.stream(
            session.encode_chat(messages), running.sampling, max_tokens=settings.max_tokens or _DEFAULT_MAX_TOKENS
        )
        for chunk in chunks:
            times.append(time.perf_counter())
            lengths.append(chunk.stats.tokens - before)
            before = chunk.stats.tokens
            answer.append(chunk.text)
        stats = chunk.stats
        kept = without_end(lengths, ended=stats.finish_reason == "stop")
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
    """The answers so far, one JSON line each behind a line that says what the run is; survives an interruption."""

    def __init__(self, file: Path, identity: str) -> None:
        self.records: list[dict[str, Any]] = []
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
        if lines and json.loads(lines[0]).get("identity") != identity:
            raise ValueError(f"{file} belongs to other questions or settings: choose another --out or remove it")
        for line in lines[1:]:
            try:
                self.records.append(json.loads(line))
            except ValueError:  # cut short by the interruption
                break
        self._file = file
        kept = [json.dumps({"identity": identity}), *map(json.dumps, self.records)]
        file.write_text("".join(line + "\n" for line in kept))

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        with self._file.open("a") as stream:
            stream.write(json.dumps(record) + "\n")

    def has(self, draft: str, budget: int | None, question: Question) -> bool:
        """Whether all turns of `question` are there; those of a question half done are dropped, to be asked again."""
        own = [
            record
            for record in self.records
            if (record["draft"], record["budget"], record["question_id"])
            == (draft, budget or "auto", question.question_id)
        ]
        if 0 < len(own) < len(question.turns):
            self.records = [record for record in self.records if record not in own]
        return len(own) == len(question.turns)


def _identity(settings: Settings, questions: Sequence[Question]) -> str:
    """A digest of what answers depend on: every setting but the kind of draft and the budget, and the questions."""
    model = settings.draft if settings.draft not in DRAFT_KINDS else "auto"
    same = asdict(replace(settings, draft=model, budget=None))
    text = json.dumps([same, [asdict(question) for question in questions]], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
