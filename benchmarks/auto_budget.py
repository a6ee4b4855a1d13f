"""`--budget auto` against the best fixed budget, with a good, a mediocre and a useless draft.

    python benchmarks/auto_budget.py [--cases resident,x16,x48] [--budgets 4,16,64,256,512] [--max-tokens 64]

The target is the demo model in memory, or widened 16 times (2.66 GB) and 48 times (7.8 GB) and streamed from disk in a
memory cgroup of 1.5 and 2.2 GB. The good draft is the demo model's NF4 copy, the mediocre one the same with noise on
its layers' weights, the useless one has layers of noise only. Budgets are tried upwards until one is a quarter slower
than the best, which eight of its passes show. In memory the best of them, auto and none then take turns, whose medians
count: of rates, and of auto's ratios to the others in the same turn. The last line printed is one JSON object: per case
and draft tokens/s by budget and auto's ratios, and the least of these, least_auto_over_best and useless_over_none. For
the second, the draft is the useless one with budget auto.
"""

import argparse
import itertools
import json
import statistics
import sys

import torch
from limits import DEMO, in_cgroup, make_cgroup, widened_demo

from app.launch import Running, open_session
from app.pacing import measured_pace
from app.presets import chosen_settings
from specexec.budget import Pace
from specexec.drafters.model import ModelDrafter
from specexec.engine import generate
from specexec.sampling import make_sampler

PROMPTS = (
    "Explain how a refrigerator works.",
    "Write a Python function that returns the longest word of a sentence.",
    "A farmer has 17 sheep and buys 25 more. How many does she have? Explain.",
)
NOISE = {"good": 0.0, "mediocre": 0.3, "useless": 10.0}  # relative to each matrix's own spread
FACTORS = {"resident": 1, "x16": 16, "x48": 48}
LIMITS = {"resident": None, "x16": 1_500_000_000, "x48": 2_200_000_000}
# How often the best budget, auto and none are measured again, by turns: a machine that is shared is faster or slower by
# a third for a while, which a disk that is waited for hides.
TURNS = {"resident": 15, "x16": 0, "x48": 0}
_HOPELESS = 0.75  # of the best rate: larger budgets are not tried any more
_PASSES = 8  # that show it


def spoil(model: torch.nn.Module, noise: float) -> None:
    """Adds noise to the draft's layers' matrices; embedding and head are the target's and stay as they are."""
    generator = torch.Generator().manual_seed(0)
    matrices = [each for each in model.get_decoder().layers.parameters() if each.dim() > 1]
    if any(each.is_meta for each in matrices):
        raise SystemExit("the draft is held packed, so that no noise can be added: raise the limit")
    with torch.no_grad():
        for each in matrices if noise else ():
            each.add_(torch.randn(each.shape, generator=generator).to(each) * each.std() * noise)


def tokens_per_s(
    running: Running, drafter: ModelDrafter | None, budget: int | None, max_tokens: int, *, least: float = 0.0
) -> float:
    """Over all prompts, their prefills not counted; `budget` None is a new session's. Below `least` it ends early."""
    session, tokens, seconds, passes = running.session, 0, 0.0, 0
    pace = budget or Pace()
    if not (budget or running.pass_bytes):
        pace = measured_pace(1024, session.target, drafter.lm, drafter.acceptance, running.sampling.temperature)
    for prompt in PROMPTS:
        ids = session.encode_chat([{"role": "user", "content": prompt}])
        session.target.clear()
        sampler = make_sampler(running.sampling, (), len(ids))
        steps = generate(session.target, drafter, ids, sampler, budget=pace, max_tokens=max_tokens)
        for step in itertools.islice(steps, 1, None):
            tokens, seconds, passes = tokens + len(step.tokens), seconds + step.draft_s + step.verify_s, passes + 1
            if passes >= _PASSES and tokens / seconds < least:
                return tokens / seconds
    return tokens / seconds


def measure(case: str, name: str, none: float, budgets: list[int], max_tokens: int) -> dict[str, float]:
    """Tokens/s of one draft by budget, `auto` and `none`, which is measured unless it is known, and auto's ratios."""
    demo, target = widened_demo(FACTORS[case]) if FACTORS[case] > 1 else (DEMO, DEMO)
    flags = {"target": str(target), "draft": str(demo), "draft_bits": "4", "ctx": "512", "budget": str(max(budgets))}
    if case == "resident":
        flags["resident"] = "30"
    chosen = chosen_settings(None, flags)
    with open_session(chosen, offline=False, note=lambda line: print(line, file=sys.stderr)) as running:
        own = running.session.drafter.lm
        spoil(own.model, NOISE[name])
        drafter = ModelDrafter(own)  # what it has learned stays, as it does from one run to the next
        found = _rates(running, drafter, none or tokens_per_s(running, None, 1, max_tokens), budgets, max_tokens, case)
    print(case, name, {key: round(rate, 2) for key, rate in found.items()}, file=sys.stderr, flush=True)
    return found


def _rates(
    running: Running, drafter: ModelDrafter, none: float, budgets: list[int], max_tokens: int, case: str
) -> dict[str, float]:
    found: dict[str, float] = {}
    for budget in budgets:
        least = _HOPELESS * max(found.values(), default=0.0)
        found[str(budget)] = tokens_per_s(running, drafter, budget, max_tokens, least=least)
        if found[str(budget)] < least:
            break
    rivals = {"auto": (drafter, None), "none": (None, 1)}
    best = max(found, key=found.__getitem__)
    if found[best] > _HOPELESS * none:
        rivals[best] = (drafter, int(best))
    rates = {key: [] for key in rivals}
    for turn in range(TURNS[case]):
        for key in [*rivals][:: -1 if turn % 2 else 1]:
            rates[key].append(tokens_per_s(running, *rivals[key], max_tokens))
    if not TURNS[case]:
        rates = {"auto": [tokens_per_s(running, drafter, None, max_tokens)], "none": [none], best: [found[best]]}
    by_turn = [dict(zip(rates, each, strict=True)) for each in zip(*rates.values(), strict=True)]
    return found | {
        **{key: statistics.median(each) for key, each in rates.items()},
        "auto_over_best": statistics.median(
            turn["auto"] / max(rate for key, rate in turn.items() if key != "auto") for turn in by_turn
        ),
        "auto_over_none": statistics.median(turn["auto"] / turn["none"] for turn in by_turn),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="resident,x16,x48")
    parser.add_argument("--drafts", default="good,mediocre,useless")
    parser.add_argument("--budgets", default="4,16,64,256,512")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--none", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        budgets = [int(each) for each in options.budgets.split(",")]
        print(json.dumps(measure(options.worker, options.drafts, options.none, budgets, options.max_tokens)))
        return
    same = ["--budgets", options.budgets, "--max-tokens", str(options.max_tokens)]
    report: dict[str, dict[str, dict[str, float]]] = {}
    for case in options.cases.split(","):
        if FACTORS[case] > 1:
            widened_demo(FACTORS[case])
        report[case], none = {}, 0.0
        for name in options.drafts.split(","):  # each in a process of its own: what one has freed is not all given back
            folder = make_cgroup(LIMITS[case]) if LIMITS[case] else None
            arguments = ["--worker", case, "--drafts", name, "--none", str(none), *same]
            report[case][name] = in_cgroup(folder, __file__, arguments)
            none = report[case][name]["none"]
            if folder is not None:
                folder.rmdir()
    rows = [row for drafts in report.values() for row in drafts.values()]
    useless = [drafts["useless"] for drafts in report.values() if "useless" in drafts]
    summary = {
        "tokens_per_s": report,
        "least_auto_over_best": min(row["auto_over_best"] for row in rows),
        "useless_over_none": min((row["auto_over_none"] for row in useless), default=None),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
