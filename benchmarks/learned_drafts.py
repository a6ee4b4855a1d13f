"""The demo model's learned drafts, trained for equally long, beside its other drafts: what each brings and costs.

    python benchmarks/learned_drafts.py PROMPTS.jsonl --runs DIR [--corpus DIR] [--minutes 60] [--budgets 8,16,auto]
        [--drafts self,ngram,suffix,none] [--number N] [--max-tokens 64]

PROMPTS.jsonl: lines of {"question_id", "category", "turns"}, as in Spec-Bench; of each category the first, answered
greedily. Takes the drafts that DIR holds and trains the others by the recipes demo-eagle3, demo-dflash and demo-dspark;
with --minutes it goes on with those that have not been trained for so long. All are measured twice: with every layer of
the target streamed from disk in a memory cgroup of 1.5 GB, and with every layer in memory. Writes the figures to
benchmarks/results/learned_drafts.json; the last line printed is the same object.
"""

import argparse
import csv
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from limits import DEMO, in_cgroup, make_cgroup
from tokens_per_pass import first_of_each_category, measure

from app.bench_prompts import read_questions
from app.recipes import load_recipe
from app.settings import Settings
from app.train_command import run_recipe

LEARNED = ("eagle3", "dflash", "dspark")
LIMIT = 1_500_000_000
PLACES = {  # layers of the target that stay in memory, and the memory that there is
    "streamed": {"resident": "0", "device_limit": str(LIMIT)},
    "resident": {"resident": "30"},
}
RESULTS = Path(__file__).parent / "results" / "learned_drafts.json"
_POINTS = 100  # of a loss curve


def trained(kind: str, options: argparse.Namespace) -> Path:
    """The directory of the draft of this kind, trained now unless it was before."""
    out = Path(options.runs) / kind
    if options.minutes is None and (out / "draft" / "config.json").is_file():
        return out
    recipe = load_recipe(f"demo-{kind}")
    if options.minutes is not None:
        recipe = replace(recipe, train=replace(recipe.train, max_minutes=options.minutes))
    corpus = Path(options.corpus) if options.corpus else Path(options.runs) / "corpus"
    settings = Settings(target=DEMO, dtype="float32")
    run_recipe(recipe, settings, out, prompts=None, corpus=corpus, offline=False, note=_note)
    return out


def curve(out: Path) -> list[dict[str, float]]:
    """Loss, agreement and held-out acceptance length by step and minute: means over pieces of the training."""
    with (out / "curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    size = max(1, len(rows) // _POINTS)
    points = []
    for start in range(0, len(rows), size):
        piece = rows[start : start + size]
        point = {key: float(piece[-1][key]) for key in ("step", "minutes")}
        point |= {key: sum(float(row[key]) for row in piece) / len(piece) for key in ("loss", "agreement")}
        lengths = [float(row["acceptance_length"]) for row in piece if row["acceptance_length"]]
        points.append(point | ({"acceptance_length": lengths[-1]} if lengths else {}))
    return points


def measured(prompts: Mapping[str, str], draft: str, place: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per pass, milliseconds per proposal and tokens per second, by budget."""
    result: dict[str, Any] = {}
    flags = {"max_tokens": str(options.max_tokens), "dtype": "float32", **PLACES[place]}
    for budget in options.budgets.split(",") if draft != "none" else ["1"]:
        counts = measure(prompts, draft, budget, flags)
        sums = {key: sum(each[key] for each in counts.values()) for key in next(iter(counts.values()))}
        result[budget] = {
            "acceptance_length": sum(each["tokens"] / each["passes"] for each in counts.values()) / len(counts),
            "ms_per_proposal": 1000 * sums["draft_s"] / sums["passes"],
            "ms_per_pass": 1000 * sums["verify_s"] / sums["passes"],
            "tokens_per_s": sums["tokens"] / (sums["draft_s"] + sums["verify_s"]),
            "by_category": {name: each["tokens"] / each["passes"] for name, each in counts.items()},
        }
        brief = {key: round(value, 2) for key, value in result[budget].items() if key != "by_category"}
        print(draft, place, budget, brief, file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--runs", required=True)
    parser.add_argument("--corpus")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--budgets", default="8,16,auto")
    parser.add_argument("--drafts", default="self,ngram,suffix,none")
    parser.add_argument("--number", type=int, help="only so many categories")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    prompts = dict(list(first_of_each_category(read_questions(options.prompts)).items())[: options.number])
    runs = {kind: Path(options.runs) / kind if options.worker else trained(kind, options) for kind in LEARNED}
    names = (*LEARNED, *filter(None, options.drafts.split(",")))
    if options.worker:
        place, name = options.worker.split(":", 1)
        print(json.dumps(measured(prompts, str(runs[name] / "draft") if name in runs else name, place, options)))
        return
    figures: dict[str, dict[str, Any]] = {place: {} for place in PLACES}
    for place in PLACES:
        folder = make_cgroup(LIMIT) if place == "streamed" else None
        for name in names:  # a process each: what a model leaves behind would count as taken for the next
            figures[place][name] = in_cgroup(folder, __file__, [*sys.argv[1:], "--worker", f"{place}:{name}"])
        if folder is not None:
            folder.rmdir()
    drafts = {}
    for name in names:
        places = {place: figures[place][name] for place in PLACES}
        drafts[name] = {"acceptance_length": next(iter(places["streamed"].values()))["acceptance_length"], **places}
        if name in runs:
            points = curve(runs[name])
            drafts[name] |= {"minutes": points[-1]["minutes"], "steps": points[-1]["step"], "curve": points}
    report = json.dumps({"max_tokens": options.max_tokens, "prompts": len(prompts), "drafts": drafts})
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(report + "\n")
    print(report)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
