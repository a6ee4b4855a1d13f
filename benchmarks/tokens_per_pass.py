"""Tokens per target pass of the demo model with its NF4 self-draft, and of published methods with the same draft.

    python benchmarks/tokens_per_pass.py PROMPTS.jsonl [--budgets 16,64,256] [--drafts self,specexec,specinfer,chain]
        [--temperature 0.6 --top-p 0.9] [--max-tokens 64] [--dtype bfloat16]

PROMPTS.jsonl: lines of {"question_id", "category", "turns"}, as in Spec-Bench and SPEED-Bench; of each category the
first. The last line printed is one JSON object: by draft and budget tokens per pass, their sums and their categories.
"""

import argparse
import json
import sys
from collections.abc import Mapping

from limits import DEMO

from app.baselines import BASELINES
from app.bench_prompts import Question, read_questions
from app.launch import open_session
from app.presets import chosen_settings

Counts = dict[str, float]


def first_of_each_category(questions: list[Question]) -> dict[str, str]:
    """The first turn of the first question of every category, in order of appearance."""
    prompts: dict[str, str] = {}
    for question in questions:
        prompts.setdefault(question.category, question.turns[0])
    return prompts


def measure(prompts: Mapping[str, str], draft: str, budget: int, flags: Mapping[str, str]) -> dict[str, Counts]:
    """Tokens, passes and seconds of each prompt; `draft` is one of BASELINES or a kind of draft."""
    method = draft if draft in BASELINES else None
    own = {"target": DEMO, "draft": "self" if method else draft, "budget": str(budget), "past": "off", "ctx": "2048"}
    results: dict[str, Counts] = {}
    with open_session(chosen_settings(None, {**own, **flags}), offline=False, note=_note, method=method) as running:
        for name, prompt in prompts.items():
            ids = running.session.encode_chat([{"role": "user", "content": prompt}])
            max_tokens = running.chosen.settings.max_tokens
            *_, last = running.session.stream(ids, running.sampling, max_tokens=max_tokens)
            stats = last.stats
            counts = {"tokens": stats.tokens, "passes": stats.passes}
            results[name] = {**counts, "draft_s": stats.draft_s, "verify_s": stats.verify_s}
    return results


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every run of `measure` may be told."""
    parser.add_argument("--max-tokens", default="64")
    parser.add_argument("--temperature", default="0")
    parser.add_argument("--top-p", default="1")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--dtype", default="bfloat16")


def flags_of(options: argparse.Namespace) -> dict[str, str]:
    """The options as settings."""
    flags = {name: getattr(options, name) for name in ("max_tokens", "seed", "dtype")}
    sampled = {"temp": options.temperature, "top_p": options.top_p} if float(options.temperature) else {}
    return {**flags, **sampled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--budgets", default="16,64,256")
    parser.add_argument("--drafts", default="self")
    parser.add_argument("--number", type=int, help="only so many categories")
    add_options(parser)
    options = parser.parse_args()
    prompts = dict(list(first_of_each_category(read_questions(options.prompts)).items())[: options.number])
    report: dict[str, dict[str, dict]] = {}
    for draft in options.drafts.split(","):
        for budget in map(int, options.budgets.split(",")):
            results = measure(prompts, draft, budget, flags_of(options))
            sums = {key: sum(each[key] for each in results.values()) for key in next(iter(results.values()))}
            overall = sums["tokens"] / sums["passes"]
            by_category = {name: each["tokens"] / each["passes"] for name, each in results.items()}
            report.setdefault(draft, {})[str(budget)] = {"tokens_per_pass": overall, **sums, "by_category": by_category}
            print(f"{draft} {budget}: {overall:.2f} tokens per pass ({sums['tokens']:.0f} / {sums['passes']:.0f})")
            print("   ", ", ".join(f"{name} {value:.2f}" for name, value in by_category.items()), flush=True)
    settings = {"temperature": float(options.temperature), "top_p": float(options.top_p), "dtype": options.dtype}
    print(json.dumps({**settings, "max_tokens": int(options.max_tokens), "drafts": report}))


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
