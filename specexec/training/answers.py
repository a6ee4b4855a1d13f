"""Texts as the target itself speaks them, many at once, with what its layers put out on the way."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, StaticCache

from specexec.device import compute_device


@dataclass(frozen=True)
class Speech:
    """One text and where the answer in it begins.

    ids: int64 [n]. features: [n, layers * H], what was asked for of the layers, and final: [n, H], what the head reads;
    None where they were not asked for. The last token was never fed, so its rows are zeros.
    """

    ids: np.ndarray
    start: int
    features: torch.Tensor | None = None
    final: torch.Tensor | None = None


@dataclass(frozen=True)
class Manner:
    """How texts are made.

    answer_tokens: the most of an answer; it ends earlier with one of `stop`, which belongs to it.
    temperatures: of the answers, taken in turn by the rows; 0 is greedy.
    bridge: ids between a user's words and the answer where the target makes up the user's words, too: its first ends
        them, if not `user_tokens` do. None: the prompts are complete.
    """

    answer_tokens: int
    temperatures: tuple[float, ...]
    stop: frozenset[int]
    bridge: tuple[int, ...] | None = None
    user_tokens: int = 0
    user_temperature: float = 0.9


@torch.inference_mode()
def speak(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    manner: Manner,
    *,
    generator: torch.Generator,
    layers: Sequence[int] | None = None,
) -> list[Speech]:
    """Continue every prompt, all of them as one batch.

    layers: whose outputs to keep beside the tokens, by their number; None keeps nothing.
    """
    device = compute_device(model)
    width = max(len(prompt) for prompt in prompts)
    skipped = [width - len(prompt) for prompt in prompts]
    rows = [_Row(list(prompt), manner, number) for number, prompt in enumerate(prompts)]
    most = width + manner.user_tokens + len(manner.bridge or ()) + manner.answer_tokens
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=most)
    places, padding = torch.arange(most, device=device), torch.tensor(skipped, device=device)[:, None]
    fed, tokens = 0, [[0] * pad + row.ids for pad, row in zip(skipped, rows, strict=True)]
    with nullcontext([]) if layers is None else listening(model, layers) as heard:
        while not all(row.is_over for row in rows):
            end = fed + len(tokens[0])
            logits = model(
                input_ids=torch.tensor(tokens, device=device),
                position_ids=(places[fed:end] - padding).clamp(min=0),
                attention_mask=(places[:end] >= padding).long(),
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            drawn = _draw(logits.float(), [row.temperature for row in rows], generator)
            tokens = [[row.take(token)] for row, token in zip(rows, drawn, strict=True)]
            fed = end
            for parts in heard:
                parts[-1] = parts[-1].bfloat16()
    whole = [torch.cat(parts, dim=1) for parts in heard]
    return [_speech(row, [each[i, skipped[i] :] for each in whole]) for i, row in enumerate(rows)]


class _Row:
    """One text as it grows: the user's words, the bridge, the answer."""

    def __init__(self, prompt: list[int], manner: Manner, number: int) -> None:
        self.ids, self.is_over = prompt, False
        self.start = len(prompt) if manner.bridge is None else -1
        self._manner, self._length, self._crossed = manner, len(prompt), 0
        self._answer_temperature = manner.temperatures[number % len(manner.temperatures)]

    @property
    def temperature(self) -> float:
        return self._manner.user_temperature if self.start < 0 else self._answer_temperature

    def take(self, drawn: int) -> int:
        """The next token: the one drawn or, between words and answer, the bridge's."""
        if self.is_over:
            return drawn
        manner = self._manner
        if self.start < 0:
            words = len(self.ids) - self._length
            if self._crossed or words == manner.user_tokens or drawn == manner.bridge[0] or drawn in manner.stop:
                drawn = manner.bridge[self._crossed]
                self._crossed += 1
            if self._crossed == len(manner.bridge):
                self.start = len(self.ids) + 1
        else:
            self.is_over = drawn in manner.stop or len(self.ids) + 1 == self.start + manner.answer_tokens
        self.ids.append(drawn)
        return drawn


@contextmanager
def listening(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[list[torch.Tensor]]]:
    """While it lasts: what every call puts out [B, n, H], as a list for each of `layers` and one for the final norm."""
    decoder = model.get_decoder()
    sources = [*(decoder.layers[layer] for layer in layers), decoder]
    heard: list[list[torch.Tensor]] = [[] for _ in sources]

    def keep(output: object, into: list[torch.Tensor]) -> None:
        into.append(output if isinstance(output, torch.Tensor) else output[0])

    handles = [
        source.register_forward_hook(lambda *call, into=into: keep(call[-1], into))
        for source, into in zip(sources, heard, strict=True)
    ]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _speech(row: _Row, features: Sequence[torch.Tensor]) -> Speech:
    """features: of each layer and the final norm, [at least len(ids) - 1, H]."""
    if not features:
        return Speech(np.array(row.ids), row.start)
    known = [part[: len(row.ids) - 1] for part in features]
    *layers, final = [torch.cat([part, torch.zeros_like(part[:1])]).cpu() for part in known]
    return Speech(np.array(row.ids), row.start, torch.cat([*layers, final[:, :0]], dim=-1), final)


def _draw(logits: torch.Tensor, temperatures: Sequence[float], generator: torch.Generator) -> list[int]:
    """A token of each row of `logits` [B, V]."""
    heat = torch.tensor(temperatures)
    drawn = logits.argmax(-1).cpu()
    warm = heat.nonzero()[:, 0]
    if len(warm):
        chances = (logits.cpu()[warm] / heat[warm, None]).softmax(-1)
        drawn[warm] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    return drawn.tolist()
