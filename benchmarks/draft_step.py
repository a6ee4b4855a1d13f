"""What a step of the draft costs beside the bare forward of its module, on the demo model and its NF4 self-draft.

    python benchmarks/draft_step.py [--rows 1,8,32,64] [--context 256] [--trees 12] [--dtype bfloat16]

A step is all that ModelDrafter does for a batch of nodes: positions and mask, the module's pass, rows of the cache, the
children, the tree's best nodes so far and the choice of the next batch. The bare forward is the same module called as
transformers would, with a DynamicCache of as many rows and no mask of ours. The two take turns step by step, and a
ratio is that of two neighbours, so that a busy machine slows both. The last line is one JSON object.
"""

import argparse
import copy
import json
import statistics
import sys
import time

import numpy as np
import torch
from transformers import DynamicCache

from app.launch import open_session
from app.presets import chosen_settings
from specexec.budget import Budget
from specexec.drafters.model import ModelDrafter
from specexec.lm import CachedLM

TEXT = "A refrigerator moves heat from its inside to the room around it. " * 40
STEPS = 4  # batches that a tree is grown in


class Alternating:
    """A draft's CachedLM that runs a bare forward of as many rows before every step, and times both."""

    def __init__(self, lm: CachedLM, context: np.ndarray) -> None:
        self.model, self.vocab_size, self.layers = lm.model, lm.vocab_size, lm.layers
        self._lm, self._context = lm, context
        with torch.inference_mode():
            self._prefilled = DynamicCache(config=lm.model.config)
            lm.model(torch.from_numpy(context)[None].to(lm.device), cache=self._prefilled, logits_to_keep=1)
        self.pairs: list[tuple[int, float, float]] = []  # rows, seconds of the bare forward, seconds of the step
        self._open: tuple[int, float, float] | None = None

    @property
    def num_free(self) -> int:
        return self._lm.num_free

    def prefill(self, context: np.ndarray) -> torch.Tensor:
        self._cache = copy.deepcopy(self._prefilled)
        return self._lm.prefill(context)

    def extend(self, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        self.end_step()
        ids = torch.from_numpy(tokens)[None].to(self._lm.device)
        with torch.inference_mode():
            started = time.perf_counter()
            self.model(ids, cache=self._cache, use_cache=True)
            bare_s = time.perf_counter() - started
        self._open = len(tokens), bare_s, time.perf_counter()
        return self._lm.extend(tokens, parents)

    def end_step(self) -> None:
        """What began with the last `extend` has ended: the next batch is chosen, or the tree is grown."""
        if self._open is not None:
            rows, bare_s, started = self._open
            self.pairs.append((rows, bare_s, time.perf_counter() - started))
        self._open = None


def measure(lm: CachedLM, context: np.ndarray, rows: int, num_trees: int) -> dict[str, float]:
    """Medians over the steps of `rows` rows of so many trees."""
    pairs: list[tuple[float, float]] = []
    turns = Alternating(lm, context)
    drafter = ModelDrafter(turns, max_batch=rows)
    for tree in range(1 + num_trees):
        turns.pairs.clear()
        drafter.propose(context, Budget(STEPS * rows, max_depth=64))
        turns.end_step()
        if tree:  # the first one allocates
            pairs += [(bare_s, step_s) for count, bare_s, step_s in turns.pairs if count == rows]
    bare, step = zip(*pairs, strict=True)
    return {
        "bare_ms": 1e3 * statistics.median(bare),
        "step_ms": 1e3 * statistics.median(step),
        "ratio": statistics.median(step_s / bare_s for bare_s, step_s in pairs),
        "ratio_of_least": min(step) / min(bare),
        "steps": len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--trees", type=int, default=12)
    parser.add_argument("--dtype", help="bfloat16 or float32; by default what a run would take here")
    arguments = parser.parse_args()
    flags = {"draft": "self", "device_limit": "12GB", "resident": "30", "budget": "256"}
    if arguments.dtype:
        flags["dtype"] = arguments.dtype
    report: dict[str, dict[str, float]] = {}
    chosen = chosen_settings("demo", flags)
    with open_session(chosen, offline=False, note=lambda line: print(line, file=sys.stderr)) as running:
        lm = running.session.drafter.lm
        ids = running.session.encode_chat([{"role": "user", "content": TEXT}])
        context = np.array(ids[: arguments.context])
        running.session.target.prefill(context)  # as in a run, the draft finds the target's rows
        for rows in map(int, arguments.rows.split(",")):
            report[str(rows)] = found = measure(lm, context, rows, arguments.trees)
            print(f"{rows} rows: " + ", ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)
        dtype = str(lm.model.dtype).removeprefix("torch.")
    worst = max(each["ratio"] for each in report.values())
    print(json.dumps({"dtype": dtype, "context": arguments.context, "rows": report, "worst_ratio": worst}))


if __name__ == "__main__":
    main()
