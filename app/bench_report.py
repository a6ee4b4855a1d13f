"""What a benchmark's log adds up to: one result per draft and budget, a table, plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.advice import Situation, advise, measured_lengths
from app.bench_metrics import Request, acceptance, timing

_PARTS = ("draft_s", "link_s", "compute_s")


def summary(records: Sequence[dict[str, Any]], versus: str | None) -> dict[str, Any]:
    """Per draft and budget: SPEED-Bench's metrics, tokens per pass and second, seconds per pass by part, guidelines.

    speedup: tokens per second against those of the same question with the draft `versus` at its budget `auto`, their
    geometric mean over all questions; speedup_quartiles: of the same ratios. Both are left out where there is no ratio.
    """
    cells: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for record in records:
        cells.setdefault((record["draft"], record["budget"]), []).append(record)
    results = [_cell(draft, budget, own) for (draft, budget), own in cells.items()]
    all_rates = {(result["draft"], result["budget"]): result.pop("question_rates") for result in results}
    baseline = all_rates.get((versus, "auto"), {})
    for result in results:
        rates = all_rates[result["draft"], result["budget"]]
        if ratios := [rate / baseline[name] for name, rate in rates.items() if rate and baseline.get(name)]:
            result["speedup"] = float(np.exp(np.mean(np.log(ratios))))
            result["speedup_quartiles"] = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return {"versus": versus, "cells": results}


def _cell(draft: str, budget: int | str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    turns: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        turns.setdefault(record["question_id"], []).append(record)
    requests = {
        name: Request(
            own[0]["category"],
            tuple(tuple(each["lengths"]) for each in own),
            tuple(tuple(each["times"]) for each in own),
        )
        for name, own in turns.items()
    }
    found = acceptance(requests)
    lengths = measured_lengths(found["Joint_Acceptance_Rate"])
    by_category: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_category.setdefault(record["category"], []).append(record)
    passes = max(sum(len(each["lengths"]) for each in records), 1)
    link_s = sum(each["link_s"] for each in records)
    parts = (sum(each["draft_s"] for each in records), link_s, sum(each["verify_s"] for each in records) - link_s)
    return {
        "draft": draft,
        "budget": budget,
        **_rates(records),
        "by_category": {category: _rates(own) for category, own in by_category.items()},
        "s_per_pass": dict(zip(_PARTS, (seconds / passes for seconds in parts), strict=True)),
        "acceptance": found,
        "timing": timing(requests),
        "guidelines": advise(Situation(**records[0]["situation"]), lengths).to_data(),
        "question_rates": {name: _rates(own)["tokens_per_s"] for name, own in turns.items()},
    }


def _rates(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    tokens = sum(sum(each["lengths"]) for each in records)
    passes = sum(len(each["lengths"]) for each in records)
    seconds = sum(each["times"][-1] - each["times"][0] for each in records)
    return {"tokens_per_pass": tokens / max(passes, 1), "tokens_per_s": tokens / max(seconds, 1e-9)}


def markdown(results: dict[str, Any]) -> str:
    """A table with a line per draft and budget, and one of acceptance lengths by category."""
    cells = results["cells"]
    lines = ["| draft | budget | Average_AL | tokens/pass | tokens/s | speed-up |", "|---|---|---|---|---|---|"]
    for cell in cells:
        gain = f"{cell['speedup']:.2f}" if "speedup" in cell else ""
        lines.append(
            f"| {cell['draft']} | {cell['budget']} | {cell['acceptance']['Average_AL']:.2f} "
            f"| {cell['tokens_per_pass']:.2f} | {cell['tokens_per_s']:.2f} | {gain} |"
        )
    categories = list(dict.fromkeys(name for cell in cells for name in cell["acceptance"]["Category_AL"]))
    lines += ["", "| Category_AL | " + " | ".join(f"{cell['draft']} {cell['budget']}" for cell in cells) + " |"]
    lines.append("|---" * (len(cells) + 1) + "|")
    for category in categories:
        found = (cell["acceptance"]["Category_AL"].get(category) for cell in cells)
        lines.append(f"| {category} | " + " | ".join("" if each is None else f"{each:.2f}" for each in found) + " |")
    lines.append("")
    for cell in cells:
        advice = cell["guidelines"]
        given = ", ".join(f"{name} {length}" for name, length in advice["draft_length"].items())
        lines.append(
            f"{cell['draft']} {cell['budget']}: {advice['regime']}-bound at {advice['ctx']} tokens of context; "
            f"draft length by guideline: {given}; binding: {advice['binding']}"
        )
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """Writes the plots as PNG."""
    from matplotlib.figure import Figure

    def save(figure: Figure, name: str) -> Path:
        figure.tight_layout()
        figure.savefig(out / name, dpi=120)
        return out / name

    cells = results["cells"]
    labels = [f"{cell['draft']}\n{cell['budget']}" for cell in cells]
    return [
        save(_against_budget(cells, "tokens_per_pass", Figure), "tokens_per_pass.png"),
        save(_against_budget(cells, "tokens_per_s", Figure), "tokens_per_s.png"),
        save(_acceptance_rates(cells, Figure), "acceptance.png"),
        save(_stacked_seconds(cells, labels, Figure), "seconds_per_pass.png"),
    ]


def _against_budget(cells: Sequence[dict[str, Any]], rate: str, figure_type: type) -> Any:
    """One panel per draft: a line per category and a thick one for all; `auto` and `none` as a dashed level."""
    drafts = list(dict.fromkeys(cell["draft"] for cell in cells))
    figure = figure_type(figsize=(5 * len(drafts), 4))
    for panel, draft in zip(figure.subplots(1, len(drafts), squeeze=False)[0], drafts, strict=True):
        own = sorted((cell for cell in cells if cell["draft"] == draft), key=lambda cell: str(cell["budget"]).zfill(8))
        fixed = [cell for cell in own if cell["budget"] != "auto"]
        budgets = [cell["budget"] for cell in fixed]
        for category in own[0]["by_category"]:
            levels = [cell["by_category"].get(category, {}).get(rate, float("nan")) for cell in fixed]
            panel.plot(budgets, levels, marker=".", linewidth=0.8, label=category)
        panel.plot(budgets, [cell[rate] for cell in fixed], marker="o", color="black", linewidth=2, label="all")
        for cell in own:
            if cell["budget"] == "auto":
                panel.axhline(cell[rate], linestyle="--", color="black", label="all, auto")
        if budgets:
            panel.set_xscale("log", base=2)
        panel.set(title=draft, xlabel="budget in nodes", ylabel=rate.replace("_per_", " per "))
        panel.legend(fontsize=6)
    return figure


def _acceptance_rates(cells: Sequence[dict[str, Any]], figure_type: type) -> Any:
    """Histogram of chunk lengths with joint and conditional rates, a row per cell."""
    figure = figure_type(figsize=(7, 2.6 * len(cells)))
    for panel, cell in zip(figure.subplots(len(cells), 1, squeeze=False)[:, 0], cells, strict=True):
        found = cell["acceptance"]
        histogram = {int(k): n for k, n in found["Acceptance_Length_Histogram"].items()}
        panel.bar(list(histogram), [n / sum(histogram.values()) for n in histogram.values()], color="lightgray")
        for name in ("Joint_Acceptance_Rate", "Conditional_Acceptance_Rate"):
            panel.plot([int(k) for k in found[name]], list(found[name].values()), marker=".", label=name)
        panel.set(title=f"{cell['draft']} {cell['budget']}", xlabel="tokens of a pass", ylim=(0, 1.05))
        panel.legend(fontsize=6)
    return figure


def _stacked_seconds(cells: Sequence[dict[str, Any]], labels: Sequence[str], figure_type: type) -> Any:
    """Draft, link and compute seconds of a pass, stacked."""
    figure = figure_type(figsize=(1.2 * len(cells) + 3, 4))
    panel = figure.subplots()
    bottom = [0.0] * len(cells)
    for part in _PARTS:
        seconds = [cell["s_per_pass"][part] for cell in cells]
        panel.bar(labels, seconds, bottom=bottom, label=part.removesuffix("_s"))
        bottom = [low + each for low, each in zip(bottom, seconds, strict=True)]
    panel.set(ylabel="seconds per pass")
    panel.legend()
    return figure
