"""The command `bench` against another server: how fast it answers, all that can be told of it from outside."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.bench_metrics import Request, timing
from app.bench_prompts import Question, read_questions, stratified
from app.environment import is_offline
from app.launch import Running, open_session
from app.progress import Progress
from app.settings import Resolved
from app.template import Message

_DEFAULT_MAX_TOKENS = 256


def bench_engine(
    chosen: Resolved, prompts: str | None, out: Path, *, number: int | None, as_json: bool, offline: bool
) -> int:
    """Asks every question, turn by turn, one at a time, and writes results and a table into `out`."""
    offline = offline or is_offline()
    questions = stratified(read_questions(prompts, offline=offline), number)
    out.mkdir(parents=True, exist_ok=True)
    requests: dict[str, Request] = {}
    with (
        open_session(chosen, offline=offline, note=_note) as running,
        Progress("bench", "questions") as progress,
    ):
        for question in questions:
            requests[question.question_id] = _answered(running, question)
            progress(len(requests), len(questions))
        results = {"engine": chosen.settings.engine, "target": running.chosen.settings.target, **_summary(requests)}
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.md").write_text(_markdown(results))
    print(json.dumps(results) if as_json else _markdown(results))
    _note(f"bench: written to {out}")
    return 0


def _answered(running: Running, question: Question) -> Request:
    """All turns of a question; a turn is one chunk, since what a pass of the server emits is not known."""
    settings, session = running.chosen.settings, running.session
    messages: list[Message] = [{"role": "system", "content": settings.system}] if settings.system else []
    lengths, times = [], []
    for text in question.turns:
        messages.append({"role": "user", "content": text})
        arrived, pieces = [time.perf_counter()], []
        most = settings.max_tokens or _DEFAULT_MAX_TOKENS
        prompt = session.encode_chat(messages)
        for chunk in session.stream(prompt, running.sampling, max_tokens=most, stop=settings.stop):
            arrived.append(time.perf_counter())
            pieces.append(chunk.text)
        messages.append({"role": "assistant", "content": "".join(pieces)})
        lengths.append((chunk.stats.tokens,))
        times.append(tuple(arrived))
    return Request(question.category, tuple(lengths), tuple(times))


def _summary(requests: dict[str, Request]) -> dict[str, Any]:
    categories: dict[str, list[Request]] = {}
    for request in requests.values():
        categories.setdefault(request.category, []).append(request)
    return {
        "tokens_per_s": _rate(list(requests.values())),
        "by_category": {category: {"tokens_per_s": _rate(own)} for category, own in categories.items()},
        "timing": timing(requests),
    }


def _rate(requests: Sequence[Request]) -> float:
    tokens = sum(sum(turn) for request in requests for turn in request.lengths)
    return tokens / max(sum(turn[-1] - turn[0] for request in requests for turn in request.times), 1e-9)


def _markdown(results: dict[str, Any]) -> str:
    lines = [f"{results['target']} at {results['engine']}", "", "| category | tokens/s |", "|---|---|"]
    lines += [f"| {category} | {own['tokens_per_s']:.2f} |" for category, own in results["by_category"].items()]
    return "\n".join([*lines, f"| all | {results['tokens_per_s']:.2f} |"]) + "\n"


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
