"""The command `run`: one prompt, its answer as it comes, one status line."""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain

from app.divergence import first_divergence, in_words
from app.environment import is_offline
from app.launch import Running, open_session
from app.plan_command import memory_lines, verdict
from app.progress import watching
from app.session import Chunk, begun
from app.settings import Resolved
from app.sizes import format_size
from app.stats import Stats, status_line
from offload.hardware import peak_rss_bytes


def run_prompt(
    prompt: str, chosen: Resolved, *, raw: bool, as_json: bool, offline: bool, verbose: bool, check: bool = False
) -> None:
    """Answers `prompt` on standard output; everything else goes to standard error.

    check: answer again without a draft and tell where the two first differ.
    """
    if check and chosen.settings.engine:
        raise ValueError("--check needs the target's own scores, which --engine does not give: leave one of them out")
    with open_session(chosen, offline=offline or is_offline(), note=_note) as running:
        settings = running.chosen.settings
        if verbose:
            _tell(running)
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        session = running.session
        ids = session.encode_raw(prompt) if raw else session.encode_chat([*system, {"role": "user", "content": prompt}])
        chunks = session.stream(ids, running.sampling, max_tokens=settings.max_tokens, stop=settings.stop)
        streamed_before = running.count_streamed()
        with watching("prefill", lambda: running.count_streamed() - streamed_before, running.pass_bytes):
            first = next(chunks)
        opening = "" if raw else session.opening(ids)
        text, tokens, stats = _collect(begun(opening, chain([first], chunks)), is_shown=not as_json)
        peak_bytes = peak_rss_bytes()
        _note(status_line(stats, running.raw_link_bps, peak_bytes, running.limit_bytes))
        if verbose and running.choice:
            _compare(stats, running, peak_bytes)
        found = first_divergence(session, ids, running.sampling, tokens) if check else None
        if check:
            _note(in_words(found, session, len(tokens)))
        if as_json:
            report = _report(text, stats, running, peak_bytes)
            checked = {"divergence": asdict(found) if found else None} if check else {}
            print(json.dumps({**report, **checked}), flush=True)


def _collect(chunks: Iterable[Chunk], *, is_shown: bool) -> tuple[str, list[int], Stats]:
    """The whole text, its tokens and its last stats; shows the text as it comes if asked to."""
    pieces: list[str] = []
    tokens: list[int] = []
    for chunk in chunks:
        pieces.append(chunk.text)
        tokens += chunk.step.tokens if chunk.step else ()
        if is_shown:
            print(chunk.text, end="", flush=True)
        stats = chunk.stats
    if is_shown:
        print(flush=True)
    return "".join(pieces), tokens, stats


def _report(text: str, stats: Stats, running: Running, peak_bytes: int) -> dict[str, object]:
    settings = running.chosen.settings
    return {
        "text": text,
        **asdict(stats),
        "tokens_per_s": stats.tokens_per_s,
        "seed": settings.seed,
        "preset": running.chosen.preset,
        "engine": settings.engine,
        "target": settings.target,
        **(_internals(stats, running, peak_bytes) if running.choice else {}),
    }


def _internals(stats: Stats, running: Running, peak_bytes: int) -> dict[str, object]:
    """What is known of an answer that was made here."""
    return {
        "tokens_per_pass": stats.tokens_per_pass,
        "s_per_pass": stats.s_per_pass,
        "link_bps": stats.link_bps,
        "raw_link_bps": running.raw_link_bps,
        "peak_bytes": peak_bytes,
        "limit_bytes": running.limit_bytes,
        "draft": running.draft,
        "budget": running.choice.budget,
        "planned_s_per_pass": running.choice.prediction.s_per_pass,
        "planned_draft_s": running.choice.prediction.draft_s,
        "planned_peak_bytes": running.plan.total_bytes,
        "num_resident": len(running.plan.resident),
        "num_streamed": len(running.plan.streamed),
    }


def _tell(running: Running) -> None:
    """Where every setting came from, and every item of memory."""
    for line in running.chosen.lines():
        _note(line)
    if running.choice is None:
        return
    checkpoint = running.checkpoint
    if checkpoint.quantization is not None:
        kept = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in checkpoint.unquantized})
        _note(f"weights: {checkpoint.quantization}; stored as they are: {', '.join(kept) or 'none'}")
    for line in (*memory_lines(running.plan), f"verdict: {verdict(running.plan)}"):
        _note(line)


def _compare(stats: Stats, running: Running, peak_bytes: int) -> None:
    """Planned against actual."""
    planned, passes = running.choice.prediction, max(stats.passes, 1)
    _note(
        f"planned: {planned.s_per_pass:.3f} s/pass, {planned.draft_s:.3f} s drafting, at most"
        f" {format_size(running.plan.total_bytes)}; actual: {stats.s_per_pass:.3f} s/pass,"
        f" {stats.draft_s / passes:.3f} s drafting, {format_size(peak_bytes)}"
    )


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
