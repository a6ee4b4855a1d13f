"""The README's figure: seconds per pass against the tree's size, measured, with the plan's link and compute lines.

    python benchmarks/pass_time.py [PNG]

The demo model widened 16 times, stored in bf16, streams in a memory cgroup of 1.5 GB. The last line printed is one JSON
object.
"""

import argparse
import json
from pathlib import Path

from limits import in_cgroup, make_cgroup, widened_demo
from matplotlib.figure import Figure
from plan_accuracy import LIMIT

BUDGETS = (1, 16, 64, 128, 256, 512)
WORKER = str(Path(__file__).with_name("plan_accuracy.py"))


def draw(cases: dict[int, dict], file: Path) -> None:
    """Measured points over the two lines that bound them from below."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    budgets = list(cases)
    axes.plot(budgets, [cases[each]["planned_link_s"] for each in budgets], "--", label="plan: bytes / link rate")
    axes.plot(budgets, [cases[each]["planned_compute_s"] for each in budgets], ":", label="plan: compute")
    axes.plot(budgets, [cases[each]["s_per_pass"] for each in budgets], "o-", label="measured")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes verified in one pass")
    axes.set_ylabel("seconds per pass")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("png", nargs="?", type=Path, default=Path("docs/pass_time.png"))
    options = parser.parse_args()
    _, wide = widened_demo(16)
    folder = make_cgroup(LIMIT)
    cases: dict[int, dict] = {}
    for budget in BUDGETS:
        case = ["--worker", "--target", str(wide), "--passes", "5", "--budget", str(budget)]
        cases[budget] = in_cgroup(folder, WORKER, case)
        print(budget, json.dumps(cases[budget]), flush=True)
    folder.rmdir()
    draw(cases, options.png)
    print(json.dumps({"budgets": cases}))


if __name__ == "__main__":
    main()
