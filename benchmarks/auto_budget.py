"""`--budget auto` against the best fixed budget, with a good, a mediocre and a useless draft.

    python benchmarks/auto_budget.py [--target DIR] [--ram-limit SIZE] [--budgets 4,16,64,256] [--max-tokens 64]

The target is the demo model, or a directory, streamed if it does not fit into the limit. The mediocre draft is the NF4
self-draft with noise on its layers' weights, the useless one with layers of noise only. The last line printed is one
JSON object: per draft tokens/s by budget, and least_auto_over_best and useless_over_none. For the second, the draft is
the useless one with budget auto.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from app.launch import Running, open_session
from app.presets import chosen_settings
from specexec.budget import Pace
from specexec.drafters.model import ModelDrafter
from specexec.engine import generate
from specexec.lm import CachedLM
from specexec.sampling import make_sampler

PROMPTS = (
    "Explain how a refrigerator works.",
    "Write a Python function that returns the longest word of a sentence.",
    "A farmer has 17 sheep and buys 25 more. How many does she have? Explain.",
)
NOISE = {"good": 0.0, "mediocre": 0.3, "useless": 10.0}  # relative to each matrix's own spread


@contextmanager
def spoilt(model: torch.nn.Module, noise: float) -> Iterator[None]:
    """The draft with noise on its layers' matrices, for a while; embedding and head are the target's and stay."""
    generator = torch.Generator().manual_seed(0)
    kept = {name: each.detach().clone() for name, each in model.get_decoder().layers.named_parameters()}
    with torch.no_grad():
        for each in model.get_decoder().layers.parameters():
            if noise and each.dim() > 1:
                each.add_(torch.randn(each.shape, generator=generator).to(each) * each.std() * noise)
    try:
        yield
    finally:
        for name, each in model.get_decoder().layers.named_parameters():
            each.data.copy_(kept[name])


def tokens_per_s(running: Running, draft: CachedLM | None, budget: int | None, max_tokens: int) -> float:
    """Over all prompts, their prefills not counted; None: auto."""
    session, tokens, seconds = running.session, 0, 0.0
    pace = budget or Pace()
    drafter = ModelDrafter(draft) if draft else None
    for prompt in PROMPTS:
        ids = session.encode_chat([{"role": "user", "content": prompt}])
        session.target.clear()
        sampler = make_sampler(running.sampling, (), len(ids))
        steps = list(generate(session.target, drafter, ids, sampler, budget=pace, max_tokens=max_tokens))
        tokens += sum(len(step.tokens) for step in steps[1:])
        seconds += sum(step.draft_s + step.verify_s for step in steps[1:])
    return tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--ram-limit")
    parser.add_argument("--budgets", default="4,16,64,256")
    parser.add_argument("--drafts", default="good,mediocre,useless")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    budgets = [int(each) for each in arguments.budgets.split(",")]
    flags = {"draft": "self", "ctx": "512", "budget": str(max(budgets))}
    flags |= {name: getattr(arguments, name) for name in ("target", "ram_limit") if getattr(arguments, name)}
    chosen = chosen_settings(None if arguments.target else "demo", flags)
    report: dict[str, dict[str, float]] = {}
    with open_session(chosen, offline=False, note=lambda line: print(line, file=sys.stderr)) as running:
        own = running.session.drafter.lm
        none = tokens_per_s(running, None, 1, arguments.max_tokens)
        for name in arguments.drafts.split(","):
            with spoilt(own.model, NOISE[name]):
                own.clear()
                found = {
                    str(budget or "auto"): tokens_per_s(running, own, budget, arguments.max_tokens)
                    for budget in (*budgets, None)
                }
            report[name] = found | {"none": none}
            print(name, {budget: round(rate, 2) for budget, rate in report[name].items()}, flush=True)
    ratios = [
        found["auto"] / max(rate for budget, rate in found.items() if budget != "auto") for found in report.values()
    ]
    useless = report.get("useless", {}).get("auto")
    print(
        json.dumps(
            {
                "tokens_per_s": report,
                "least_auto_over_best": min(ratios),
                "useless_over_none": useless / none if useless else None,
            }
        )
    )


if __name__ == "__main__":
    main()
