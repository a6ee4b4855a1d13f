"""The `train` command: from a recipe and a target to a learned draft in a directory."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from app.draft import attention_for
from app.launch import compute_dtype, device_name
from app.models import locate
from app.progress import Progress
from app.recipes import load_recipe
from app.session import stop_ids_of
from app.settings import Settings, resolve
from app.target import load_tokenizer, open_target
from app.training_texts import corpus_task, read_prompts
from offload.hardware import probe
from offload.load import load_model, outline
from offload.plan import plan
from specexec.training.batches import Batch, collate
from specexec.training.corpus import Corpus, frequent, make_corpus
from specexec.training.evaluate import acceptance_length
from specexec.training.files import replace_whole
from specexec.training.loop import Surroundings, Training
from specexec.training.nets import feature_layers, public_config, public_tensors
from specexec.training.objectives import level, make_objective
from specexec.training.recipe import Recipe

_LEVEL_TEXTS = 16


@dataclass(frozen=True)
class Target:
    """The model that a draft is trained for, all of it in memory."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop: frozenset[int]

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()


def train_draft(
    name_or_file: str,
    flags: Mapping[str, str],
    out: Path,
    *,
    prompts: Path | None,
    corpus: Path | None,
    as_json: bool,
    offline: bool,
) -> None:
    """The command itself; `flags` are settings. Says where the draft is and how it did.

    Raises ValueError, OSError or FloatingPointError, each in one line.
    """
    recipe = load_recipe(name_or_file)
    settings = resolve({"target": recipe.target, **flags}, {}, {}).settings
    if settings.target is None:
        raise ValueError(f"recipe {name_or_file} is for any target: say which by --target")

    def note(line: str) -> None:
        print(f"train: {line}", file=sys.stderr)

    best = run_recipe(recipe, settings, out, prompts=prompts, corpus=corpus, offline=offline, note=note)
    if best is not None:
        draft = str(out / "draft")
        print(
            json.dumps({"draft": draft, "acceptance_length": best}) if as_json else f"{draft}: {best:.2f} tokens a pass"
        )


def run_recipe(
    recipe: Recipe,
    settings: Settings,
    out: Path,
    *,
    prompts: Path | None,
    corpus: Path | None,
    offline: bool,
    note: Callable[[str], None],
) -> float | None:
    """Make the corpus, train, and leave the best draft in out/draft; its held-out acceptance length, None on all
    processes but the main one.

    corpus: where the texts are, or are to be made; out/corpus by default. Goes on where an earlier run was interrupted.
    """
    texts = None if prompts is None else read_prompts(prompts)
    accelerator = Accelerator(cpu=device_name(settings.device) == "cpu", mixed_precision=_precision(recipe, settings))
    if not accelerator.is_main_process:
        note = _silently
    with ExitStack() as opened:
        target = opened.enter_context(_Loading(settings, accelerator.device, offline=offline))
        student, layers = _student(recipe, target, offline=offline), _layers(recipe, target)
        stored = layers if recipe.data.features == "cached" else None
        folder = corpus or out / "corpus"
        task = corpus_task(target.tokenizer, recipe.data, texts, stop=target.stop, layers=stored)
        share = accelerator.process_index, accelerator.num_processes
        with Progress("speak", "texts") as progress:
            told = progress if accelerator.is_main_process else _silently
            make_corpus(target.model, task, folder, share=share, progress=told)
        accelerator.wait_for_everyone()
        run = _Run(recipe, target, Corpus(folder, stored), layers, student)
        _require_same_run(out, run.described(), accelerator)
        note(f"{len(run.numbers)} texts to train on, {len(run.held_out)} held out; the net has {run.size}")
        with Progress("train", "steps") as progress:
            told = progress if accelerator.is_main_process else _silently
            around = Surroundings(run.batch, run.evaluate, lambda: run.publish(out / "draft"), told, note)
            best = Training(run.objective, run.numbers, recipe.train, out, accelerator=accelerator, around=around).run()
    return best if accelerator.is_main_process else None


class _Loading:
    """The target, resident; its files are closed when it is left."""

    def __init__(self, settings: Settings, device: torch.device, *, offline: bool) -> None:
        self._settings, self._device = settings, device
        self._checkpoint = open_target(settings, offline=offline)

    def __enter__(self) -> Target:
        checkpoint, hardware = self._checkpoint, probe(self._device.type)
        dtype, attention = compute_dtype(self._settings.dtype, hardware), attention_for(checkpoint)
        layers = outline(checkpoint, dtype=dtype, attn_implementation=attention).layers
        everything = plan(layers, fixed={}, limit_bytes=2**63, resident=len(layers))
        self._loaded = load_model(
            checkpoint, everything, device=self._device, dtype=dtype, attn_implementation=attention
        )
        tokenizer = load_tokenizer(checkpoint.path)
        stop = stop_ids_of(tokenizer, checkpoint.config.get_text_config(), checkpoint.generation_config)
        return Target(self._settings.target, self._loaded.model.requires_grad_(False), tokenizer, frozenset(stop))

    def __exit__(self, *_: object) -> None:
        self._loaded.close()


class _Run:
    """A recipe over a corpus: which texts, which net, how it is measured and stored."""

    def __init__(
        self, recipe: Recipe, target: Target, corpus: Corpus, layers: tuple[int, ...], student: PreTrainedModel | None
    ) -> None:
        self._recipe, self._target, self._corpus, self._layers = recipe, target, corpus, layers
        count = min(len(corpus), recipe.data.sequences)
        self.held_out, self.numbers = range(min(recipe.data.held_out, count)), range(recipe.data.held_out, count)
        if not self.held_out or not self.numbers:
            raise ValueError(f"{count} texts are too few with {recipe.data.held_out} of them held out: make more")
        size = target.config.vocab_size
        said = corpus.counts(self.numbers, size)
        vocabulary = None
        if recipe.draft.vocabulary is not None and recipe.draft.vocabulary < size:
            vocabulary = frequent(said, recipe.draft.vocabulary)
        mask_token = int(np.flatnonzero(said == 0)[-1]) if (said == 0).any() else size - 1
        self.objective = make_objective(recipe, target.model, vocabulary, mask_token=mask_token, student=student)
        if student is None:
            few = list(self.numbers)[:_LEVEL_TEXTS]
            level(self.objective.net, [self.batch(few, [0] * len(few))])

    @property
    def size(self) -> str:
        """Of what is trained."""
        return f"{sum(each.numel() for each in self.objective.net.parameters()) / 1e6:.1f} million parameters"

    def described(self) -> dict[str, Any]:
        """What must be the same where an interrupted run goes on."""
        return {"recipe": asdict(self._recipe), "target": self._target.name, "texts": len(self.numbers)}

    def batch(self, numbers: Sequence[int], seeds: Sequence[int]) -> Batch:
        texts = [self._corpus.text(number, self._recipe.train.max_tokens) for number in numbers]
        return collate(texts, seeds, model=self._target.model, layers=self._layers)

    def evaluate(self) -> float:
        recipe = self._recipe.train
        texts = [self._corpus.text(number) for number in list(self.held_out)[: recipe.evaluate_prompts]]
        return acceptance_length(
            self._target.model,
            self.objective.drafter,
            [text.ids[: text.start].tolist() for text in texts],
            max_tokens=recipe.evaluate_tokens,
            budget=recipe.evaluate_budget,
            stop=self._target.stop,
        )

    def publish(self, directory: Path) -> None:
        """Store the net as it is in the public layout: a directory that --draft takes."""
        net, target = self.objective.net, self._target
        if isinstance(net, PreTrainedModel):
            net.save_pretrained(directory)
            target.tokenizer.save_pretrained(directory)
            return
        tensors = public_tensors(net, target.config.vocab_size)
        config = json.dumps(public_config(net, target.config, target.name), indent=2)
        replace_whole(directory / "model.safetensors", lambda place: save_file(tensors, place))
        replace_whole(directory / "config.json", lambda place: place.write_text(config))


def _layers(recipe: Recipe, target: Target) -> tuple[int, ...]:
    """The target's layers whose outputs the draft reads; ValueError for layers that it does not have."""
    count = target.config.num_hidden_layers
    layers = feature_layers(recipe.kind, recipe.draft, count)
    if beyond := [layer for layer in layers if not 0 <= layer < count]:
        raise ValueError(f"draft.layers {beyond}: the target has layers 0 to {count - 1}")
    return layers


def _student(recipe: Recipe, target: Target, *, offline: bool) -> PreTrainedModel | None:
    if recipe.kind != "distill":
        return None
    if recipe.draft.model is None:
        raise ValueError('a recipe of kind "distill" needs draft.model, the small model to begin from')
    directory = locate(recipe.draft.model, offline=offline)
    if load_tokenizer(directory).get_vocab() != target.tokenizer.get_vocab():
        raise ValueError(
            f"{recipe.draft.model} has another tokenizer than {target.name}: its logits cannot be compared"
        )
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def _precision(recipe: Recipe, settings: Settings) -> str:
    """Mixed precision only where the device computes faster in it: four times on a CPU with instructions for bf16."""
    if recipe.train.precision != "auto":
        return recipe.train.precision
    device = device_name(settings.device)
    return "bf16" if probe(device).has_bf16 else "no" if device == "cpu" else "fp16"


def _require_same_run(out: Path, described: dict[str, Any], accelerator: Accelerator) -> None:
    file, text = out / "run.json", json.dumps(described, indent=2)
    if file.is_file():
        if json.loads(file.read_text()) != json.loads(text):
            raise ValueError(f"{out} holds a run of another recipe, target or corpus: give another --out or remove it")
    elif accelerator.is_main_process:
        replace_whole(file, lambda place: place.write_text(text))
    accelerator.wait_for_everyone()


def _silently(*_: object) -> None:
    pass
