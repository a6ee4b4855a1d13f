"""A small world to train drafts in: a tiny target, what it says, and runs over that. As a program: one run."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tiny import VOCAB, tiny_model
from transformers import PreTrainedModel

from specexec.training.answers import Manner
from specexec.training.batches import Batch, collate
from specexec.training.corpus import Corpus, Task, make_corpus
from specexec.training.evaluate import acceptance_length
from specexec.training.loop import Surroundings, Training
from specexec.training.objectives import make_objective
from specexec.training.recipe import DataRecipe, DraftRecipe, Recipe, TrainRecipe

LAYERS = (0, 1, 2)
STOP = frozenset([2])
RECIPE = Recipe(
    "dflash",
    data=DataRecipe(sequences=16, held_out=4, batch=8, answer_tokens=16),
    draft=DraftRecipe(num_layers=1, intermediate=96, layers=LAYERS, block_size=5, markov_rank=16),
    train=TrainRecipe(
        learning_rate=3e-3,
        epochs=30,
        batch=4,
        anchors=16,
        steps_ahead=3,
        evaluate_every=10_000,
        evaluate_prompts=4,
        evaluate_tokens=16,
        checkpoint_every=10_000,
    ),
)


def _accelerator() -> Accelerator:
    """One in fp32, whatever an earlier test of this process has set: accelerate keeps one state for all."""
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, mixed_precision="no")


def sure_model() -> PreTrainedModel:
    """A tiny target that nearly knows what it says, as real ones do; random weights alone are of many minds."""
    model = tiny_model("llama")
    model.lm_head.weight.mul_(6)
    return model


def changed(kind: str = "dflash", **train: object) -> Recipe:
    draft = replace(RECIPE.draft, layers=None) if kind == "mtp" else RECIPE.draft
    return replace(RECIPE, kind=kind, draft=draft, train=replace(RECIPE.train, **train))


def task(count: int = 16, *, layers: tuple[int, ...] | None = LAYERS, about: str = "a test's") -> Task:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, VOCAB, rng.integers(3, 9)).tolist() for _ in range(count)]
    return Task(prompts, Manner(16, (0.0,), STOP), 8, 0, layers, about)


def spoken(directory: Path, model: PreTrainedModel) -> Corpus:
    """Greedy answers of `model` to random prompts."""
    make_corpus(model, task(), directory, progress=lambda *_: None)
    return Corpus(directory, LAYERS)


class Lesson:
    """A run whose held-out texts are among those it learns from, since what is to be seen is that it learns."""

    def __init__(self, directory: Path, recipe: Recipe, model: PreTrainedModel, corpus: Corpus) -> None:
        self.directory, self.recipe, self.model, self.corpus = directory, recipe, model, corpus
        student = tiny_model("llama", seed=9).requires_grad_(True)
        self.objective = make_objective(recipe, model, None, mask_token=7, student=student)
        self.num_published, self.seen = 0, []

    def batch(self, numbers: list[int], seeds: list[int]) -> Batch:
        self.seen.append(numbers)
        return collate([self.corpus.text(each) for each in numbers], seeds, model=self.model, layers=LAYERS)

    def evaluate(self) -> float:
        train = self.recipe.train
        texts = [self.corpus.text(number) for number in range(train.evaluate_prompts)]
        return acceptance_length(
            self.model,
            self.objective.drafter,
            [text.ids[: text.start].tolist() for text in texts],
            max_tokens=train.evaluate_tokens,
            budget=train.evaluate_budget,
            stop=STOP,
        )

    def publish(self) -> None:
        self.num_published += 1

    def training(self) -> Training:
        return Training(
            self.objective,
            range(len(self.corpus)),
            self.recipe.train,
            self.directory,
            accelerator=_accelerator(),
            around=Surroundings(self.batch, self.evaluate, self.publish, lambda *_: None, lambda line: None),
        )


def curve(directory: Path) -> list[tuple[int, float]]:
    """Steps and losses of a run; none of one that is just beginning its file."""
    lines = (directory / "curve.csv").read_text().splitlines()
    if not lines:
        return []
    place = lines[0].split(",").index("loss")
    return [(int(line.split(",")[0]), float(line.split(",")[place])) for line in lines[1:]]


if __name__ == "__main__":
    texts, out, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    recipe = changed(sys.argv[4], epochs=steps // 4, checkpoint_every=3)
    Lesson(out, recipe, sure_model(), Corpus(texts, LAYERS)).training().run()
