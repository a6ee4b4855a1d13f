"""What drafting, masks, the walk and cache moves cost beside the two models' own forward passes, on the demo model.

    python benchmarks/loop_cost.py [--budgets 16,64,256,1024] [--max-tokens 32] [--profile]

Everything is resident. `loop_share` is the time outside both models' forward passes over the time inside them;
`growth_ms_per_node` the time of a proposal over its nodes. --profile prints where the time outside goes. The last line
is one JSON object.
"""

import argparse
import cProfile
import json
import pstats
import sys
import time

from app.launch import open_session
from app.presets import chosen_settings

PROMPTS = ("Explain how a refrigerator works.", "Write a short story about a lighthouse keeper and a storm.")


class Stopwatch:
    """Seconds spent inside the forward passes of the models it is attached to."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._started = 0.0

    def attach(self, model: object) -> None:
        model.register_forward_pre_hook(lambda *_: self._start())
        model.register_forward_hook(lambda *_: self._stop(), always_call=True)

    def _start(self) -> None:
        self._started = time.perf_counter()

    def _stop(self) -> None:
        self.total_s += time.perf_counter() - self._started


def measure(budget: int, max_tokens: int) -> dict[str, float]:
    """Seconds inside and outside the models over PROMPTS."""
    flags = {"draft": "self", "budget": str(budget), "device_limit": "12GB", "resident": "30"}
    chosen = chosen_settings("demo", flags)
    with open_session(chosen, offline=False, note=lambda line: print(line, file=sys.stderr)) as running:
        session = running.session
        watch = Stopwatch()
        for lm in (session.target, session.drafter.lm):
            watch.attach(lm.model)
        ids = [session.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
        list(session.stream(ids[0], running.sampling, max_tokens=8))  # first passes allocate
        watch.total_s = 0.0
        drafted, draft_s, elapsed_s = 0, 0.0, 0.0
        for prompt in ids:
            *_, last = session.stream(prompt, running.sampling, max_tokens=max_tokens)
            drafted += last.stats.drafted
            draft_s += last.stats.draft_s
            elapsed_s += last.stats.draft_s + last.stats.verify_s
    return {
        "models_s": watch.total_s,
        "outside_s": elapsed_s - watch.total_s,
        "loop_share": (elapsed_s - watch.total_s) / watch.total_s,
        "growth_ms_per_node": 1e3 * draft_s / drafted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="16,64,256,1024")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    report: dict[str, dict[str, float]] = {}
    for budget in map(int, arguments.budgets.split(",")):
        profile = cProfile.Profile()
        if arguments.profile:
            profile.enable()
        report[str(budget)] = found = measure(budget, arguments.max_tokens)
        if arguments.profile:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats("specexec|torch._C|numpy", 15)
        print(f"budget {budget}: " + ", ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)
    print(json.dumps({"budgets": report, "most_loop_share": max(each["loop_share"] for each in report.values())}))


if __name__ == "__main__":
    main()
