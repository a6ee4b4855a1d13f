"""The training loop: the same steps however often it is interrupted, and on however many processes."""

import csv
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from specexec.training.batches import Batch
from specexec.training.files import explained
from specexec.training.recipe import TrainRecipe

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:  # it is not installed: the CSV says the same
    SummaryWriter = None


@dataclass(frozen=True)
class Row:
    """A line of curve.csv; acceptance_length only where it was measured after the step."""

    step: int
    epoch: int
    minutes: float
    learning_rate: float
    loss: float
    agreement: float
    acceptance_length: float | None = None


@dataclass
class _State:
    step: int = 0
    minutes: float = 0.0
    best: float = 0.0
    num_worse: int = 0
    is_measured: bool = False  # whether the net is the one that was measured last


@dataclass(frozen=True)
class Surroundings:
    """What the loop needs of the world.

    batch: the texts of these numbers, with a seed for each. evaluate: the held-out acceptance length of the net as it
    is; publish: stores that net as the best one so far; both run on the main process. progress: told steps done and
    expected; note: told a line.
    """

    batch: Callable[[Sequence[int], Sequence[int]], Batch]
    evaluate: Callable[[], float]
    publish: Callable[[], None]
    progress: Callable[[int, int], None]
    note: Callable[[str], None]


class Training:
    """A run in `directory`: checkpoints in it and curve.csv.

    objective: gives [loss, weight, ...] sums of a batch, and has its trainable net as parameters.
    numbers: of the texts to train on. Raises ValueError where a step's batch cannot be filled or shared out evenly.
    """

    def __init__(
        self,
        objective: nn.Module,
        numbers: Sequence[int],
        recipe: TrainRecipe,
        directory: Path,
        *,
        accelerator: Accelerator,
        around: Surroundings,
    ) -> None:
        if recipe.batch % accelerator.num_processes:
            raise ValueError(f"a batch of {recipe.batch} cannot be shared by {accelerator.num_processes} processes")
        if len(numbers) < recipe.batch:
            raise ValueError(
                f"{len(numbers)} texts do not fill one batch of {recipe.batch}: make more, or train.batch less"
            )
        self._recipe, self._directory, self._numbers, self._around = recipe, directory, np.array(numbers), around
        self._accelerator, self._state = accelerator, _State()
        optimizer = torch.optim.AdamW(
            [each for each in objective.parameters() if each.requires_grad],
            lr=recipe.learning_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
        )
        self._objective, self._optimizer = accelerator.prepare(objective.to(accelerator.device), optimizer)
        self._steps_per_epoch = len(numbers) // recipe.batch
        self._total = recipe.epochs * self._steps_per_epoch
        self._resume()

    def run(self) -> float:
        """Train until the recipe is through; the best acceptance length. Raises FloatingPointError for a loss that is
        not a number, naming the batch, and OSError where a checkpoint cannot be written."""
        recipe, state = self._recipe, self._state
        curve = _Curve(self._directory, state.step) if self._accelerator.is_main_process else None
        started = time.monotonic() - 60 * state.minutes
        while (part := self._part()) < 1 and state.num_worse < recipe.patience:
            rate = recipe.learning_rate * self._factor(part)
            loss, agreement = self._step(rate)
            state.step, state.is_measured = state.step + 1, False
            state.minutes = self._same((time.monotonic() - started) / 60)
            length = self._measure() if state.step % recipe.evaluate_every == 0 else None
            if curve is not None:
                epoch = (state.step - 1) // self._steps_per_epoch
                curve.add(Row(state.step, epoch, round(state.minutes, 3), rate, loss, agreement, length))
            if state.step % recipe.checkpoint_every == 0:
                self._save()
            self._around.progress(state.step, max(round(state.step / max(self._part(), 1e-9)), state.step))
        if not state.is_measured and state.step:
            length = self._measure()
            self._around.note(f"held-out acceptance length at the end: {length:.2f}")
        self._save()
        return state.best

    def _part(self) -> float:
        """How much of the training is done, by steps or by the clock."""
        most = self._recipe.max_minutes
        return max(self._state.step / self._total, self._state.minutes / most if most else 0.0)

    def _factor(self, part: float) -> float:
        """Of the learning rate, after that part of the training."""
        warmup = self._recipe.warmup
        if part < warmup:
            return (part + 1 / self._total) / (warmup + 1 / self._total)
        rest = (part - warmup) / (1 - warmup)
        return (1 + math.cos(math.pi * rest)) / 2 if self._recipe.schedule == "cosine" else 1 - rest

    def _step(self, rate: float) -> tuple[float, float]:
        """One update; loss and agreement of the whole batch, over all processes."""
        accelerator, recipe = self._accelerator, self._recipe
        epoch, place = divmod(self._state.step, self._steps_per_epoch)
        order = np.random.default_rng((recipe.seed, epoch)).permutation(self._numbers)
        chosen = order[place * recipe.batch : (place + 1) * recipe.batch].tolist()
        mine = chosen[accelerator.process_index :: accelerator.num_processes]
        seeds = [int(np.random.SeedSequence((recipe.seed, epoch, number)).generate_state(1)[0]) for number in mine]
        torch.manual_seed(recipe.seed + self._state.step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with accelerator.autocast():
            sums = self._objective(self._around.batch(mine, seeds))
        total = accelerator.reduce(sums.detach(), "sum")
        loss, weight, agreed, count = total.tolist()
        self._require_finite(loss, chosen)
        # DistributedDataParallel averages over processes; the loss is that of the whole batch.
        accelerator.backward(sums[0] * accelerator.num_processes / max(weight, 1e-9))
        norm = accelerator.clip_grad_norm_(self._objective.parameters(), recipe.clip)
        if accelerator.scaler is None:  # fp16's own scaler skips a step that overflows
            self._require_finite(float(norm), chosen)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss / max(weight, 1e-9), agreed / max(count, 1)

    def _require_finite(self, value: float, chosen: Sequence[int]) -> None:
        if math.isfinite(value):
            return
        kept = self._latest()
        where = f"the last good checkpoint is {kept}" if kept else "there is no checkpoint yet"
        raise FloatingPointError(
            f"step {self._state.step + 1}: the loss or its gradient is not a number, in the batch of texts "
            f"{', '.join(map(str, chosen))}; {where}: leave these texts out or lower train.learning_rate"
        )

    def _measure(self) -> float:
        """The held-out acceptance length; the net is published if none before was better."""
        state, main = self._state, self._accelerator.is_main_process
        self._objective.eval()
        length = [self._around.evaluate() if main else 0.0]
        self._objective.train()
        broadcast_object_list(length)
        state.is_measured = True
        state.num_worse = 0 if length[0] > state.best else state.num_worse + 1
        if length[0] > state.best:
            state.best = length[0]
            if main:
                self._around.publish()
        return length[0]

    def _same(self, value: float) -> float:
        """The main process's value, in all of them."""
        values = [value]
        broadcast_object_list(values)
        return values[0]

    def _save(self) -> None:
        """A checkpoint under a name of its own, which it gets when it is whole; older ones are dropped."""
        accelerator, final = self._accelerator, self._directory / f"step-{self._state.step:08d}"
        if final.is_dir():
            return
        draft = self._directory / "step.unfinished"
        if accelerator.is_main_process:
            shutil.rmtree(draft, ignore_errors=True)
        accelerator.wait_for_everyone()
        with explained(draft):
            accelerator.save_state(str(draft))
            if accelerator.is_main_process:
                (draft / "state.json").write_text(json.dumps(asdict(self._state)))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            draft.replace(final)
            for older in self._directory.glob("step-*"):
                if older != final:
                    shutil.rmtree(older)

    def _latest(self) -> Path | None:
        return max(self._directory.glob("step-*"), default=None)

    def _resume(self) -> None:
        if (latest := self._latest()) is None:
            return
        self._accelerator.load_state(str(latest))
        self._state = _State(**json.loads((latest / "state.json").read_text()))
        self._around.note(f"goes on from step {self._state.step}")


class _Curve:
    """curve.csv, and TensorBoard's files if it is installed; what an interrupted run had beyond `step` is dropped."""

    def __init__(self, directory: Path, step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "curve.csv"
        names = [each.name for each in fields(Row)]
        kept = []
        if self._path.is_file():
            with self._path.open(newline="") as file:
                kept = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
        with self._path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(kept)
        self._board = None if SummaryWriter is None else SummaryWriter(str(directory / "board"), purge_step=step + 1)

    def add(self, row: Row) -> None:
        values = asdict(row)
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow(["" if value is None else value for value in values.values()])
        for name, value in values.items() if self._board is not None else ():
            if name != "step" and value is not None:
                self._board.add_scalar(name, value, row.step)
