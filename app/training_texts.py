"""What a target is asked, or made to ask itself, for the corpus of a learned draft."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from app.template import render
from specexec.training.answers import Manner
from specexec.training.corpus import Task
from specexec.training.recipe import DataRecipe

_MARK = "USER-WORDS"  # stands where the user's text goes, so that the template can be cut there
_SAME = (
    "batch",
    "answer_tokens",
    "user_tokens",
    "user_temperature",
    "temperatures",
    "seed",
)  # for texts to be the same


def read_prompts(path: Path) -> list[str]:
    """The first turn of every line of a JSONL file: its `prompt`, or the first of its `turns`."""
    if not path.is_file():
        raise FileNotFoundError(f"no prompts at {path}")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from None
    if not lines:
        raise ValueError(f'{path} holds no prompts: give one {{"prompt": "..."}} a line, or leave out --prompts')
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            prompts.append(record["prompt"] if "prompt" in record else record["turns"][0])
        except (ValueError, KeyError, TypeError, IndexError):
            raise ValueError(f'{path}, line {number}: needs {{"prompt": "..."}} or {{"turns": ["..."]}}') from None
    return prompts


def _digest(prompts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:16]


def corpus_task(
    tokenizer: PreTrainedTokenizerBase,
    recipe: DataRecipe,
    prompts: Sequence[str] | None,
    *,
    stop: frozenset[int],
    layers: tuple[int, ...] | None,
) -> Task:
    """What the target is to say: answers to `prompts`, or to words that it makes up in the user's place."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    def opened(text: str) -> list[int]:
        """As Session.encode_chat: a template may leave the first token to the tokenizer."""
        first = tokenizer("").input_ids[:1]
        return [*first, *ids(text)] if first == [tokenizer.bos_token_id] != ids(text)[:1] else ids(text)

    bridge, user_tokens = None, 0
    if prompts is None:
        before, after = render(tokenizer, [{"role": "user", "content": _MARK}]).split(_MARK)
        texts, bridge, user_tokens = [opened(before)] * recipe.sequences, tuple(ids(after)), recipe.user_tokens
    else:
        texts = [opened(render(tokenizer, [{"role": "user", "content": each}])) for each in prompts[: recipe.sequences]]
    manner = Manner(recipe.answer_tokens, recipe.temperatures, stop, bridge, user_tokens, recipe.user_temperature)
    made = {key: asdict(recipe)[key] for key in _SAME} | {"prompts": "own" if prompts is None else _digest(prompts)}
    return Task(texts, manner, recipe.batch, recipe.seed, layers, json.dumps(made))
