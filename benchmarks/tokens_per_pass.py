"""Tokens per target pass of the demo model with its NF4 self-draft, greedy: the first prompt of every category.

    python benchmarks/tokens_per_pass.py PROMPTS.jsonl [--budgets 16,64,256] [--max-tokens 64]

PROMPTS.jsonl: lines of {"question_id", "category", "turns"}, as in Spec-Bench and SPEED-Bench. The last line printed is
one JSON object.
"""

import argparse
import json
import sys
from pathlib import Path

from app.launch import open_session
from app.presets import chosen_settings


def first_of_each_category(file: Path) -> dict[str, str]:
    """The first turn of the first prompt of every category, in order of appearance."""
    prompts: dict[str, str] = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        prompts.setdefault(record["category"], record["turns"][0])
    return prompts


def measure(prompts: dict[str, str], budget: int, max_tokens: int) -> dict[str, dict[str, float]]:
    """Tokens, passes and seconds per category."""
    chosen = chosen_settings("demo", {"budget": str(budget), "device_limit": "8GB", "dtype": "bfloat16"})
    results: dict[str, dict[str, float]] = {}
    with open_session(chosen, offline=False, note=lambda line: print(line, file=sys.stderr)) as running:
        for category, prompt in prompts.items():
            ids = running.session.encode_chat([{"role": "user", "content": prompt}])
            *_, last = running.session.stream(ids, running.sampling, max_tokens=max_tokens)
            stats = last.stats
            results[category] = {
                "tokens": stats.tokens,
                "passes": stats.passes,
                "draft_s": stats.draft_s,
                "verify_s": stats.verify_s,
            }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--budgets", default="16,64,256")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    prompts = first_of_each_category(arguments.prompts)
    report: dict[str, dict] = {}
    for budget in map(int, arguments.budgets.split(",")):
        results = measure(prompts, budget, arguments.max_tokens)
        sums = {key: sum(each[key] for each in results.values()) for key in ("tokens", "passes", "draft_s", "verify_s")}
        overall = sums["tokens"] / sums["passes"]
        by_category = {name: each["tokens"] / each["passes"] for name, each in results.items()}
        report[str(budget)] = {"tokens_per_pass": overall, **sums, "by_category": by_category}
        print(f"budget {budget}: {overall:.2f} tokens per pass ({sums['tokens']:.0f} / {sums['passes']:.0f})")
        for name, value in by_category.items():
            print(f"    {name:<16} {value:.2f}", flush=True)
    print(json.dumps({"budgets": report}))


if __name__ == "__main__":
    main()
