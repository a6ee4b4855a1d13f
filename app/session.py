"""From messages to text: chat template, engine steps, decoded chunks, and what each answer cost."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from app.stats import Stats
from app.textstream import TextStream
from specexec.drafters import Drafter
from specexec.engine import generate
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams, make_sampler

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")


@dataclass(frozen=True)
class Chunk:
    """A piece of the answer, maybe empty, and the sums up to it; the last chunk's stats have a finish_reason."""

    text: str
    stats: Stats


class Session:
    """A target, a drafter and a tokenizer that answer prompts one after another.

    ctx: the most tokens of prompt and answer together. budget: the most nodes of a tree.
    stop_ids: tokens that end an answer. count_streamed: bytes that have crossed the link so far.
    """

    def __init__(
        self,
        target: CachedLM,
        drafter: Drafter | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ctx: int,
        budget: int,
        stop_ids: frozenset[int],
        count_streamed: Callable[[], int] = lambda: 0,
    ) -> None:
        self._target, self._drafter, self._tokenizer = target, drafter, tokenizer
        self._ctx, self._budget, self._stop_ids = ctx, budget, stop_ids
        self._count_streamed = count_streamed

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of `messages` in the model's own chat template, up to where the answer begins."""
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template: use --raw to continue the prompt as plain text")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error
        return self._encode(text, add_special_tokens=False)

    def encode_raw(self, text: str) -> list[int]:
        """Token ids of plain text, with whatever the tokenizer puts before it."""
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] and add_special_tokens else ids

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[Chunk]:
        """Answers `prompt`, a chunk a pass. ValueError if it is empty or leaves no room for an answer within ctx."""
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) >= self._ctx:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and the context holds {self._ctx}, at least one of them for the "
                f"answer: shorten the prompt or raise --ctx"
            )
        room = self._ctx - len(prompt)
        sampler = make_sampler(params, self._stop_ids, len(prompt))
        text = TextStream(self._decode, stop)
        stats = Stats(prompt_tokens=len(prompt))
        started, streamed_before = time.perf_counter(), self._count_streamed()
        for step in generate(
            self._target,
            self._drafter,
            prompt,
            sampler,
            budget=self._budget,
            max_tokens=min(max_tokens or room, room),
            stop=self._stop_ids,
        ):
            pieces, num_used = [], 0
            for token in step.tokens:
                num_used += 1
                if token in self._stop_ids:
                    break
                pieces.append(text.push(token))
                if text.is_stopped:
                    break
            if step.finish:
                pieces.append(text.flush())
            stats = replace(
                stats,
                tokens=stats.tokens + num_used,
                passes=stats.passes + 1,
                drafted=stats.drafted + step.drafted,
                accepted=stats.accepted + step.accepted,
                draft_s=stats.draft_s + step.draft_s,
                verify_s=stats.verify_s + step.verify_s,
                elapsed_s=time.perf_counter() - started,
                streamed_bytes=self._count_streamed() - streamed_before,
                finish_reason="stop" if text.is_stopped else step.finish,
            )
            yield Chunk("".join(pieces), stats)
            if text.is_stopped:
                return

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stop_ids_of(tokenizer: PreTrainedTokenizerBase, *configs: Any) -> frozenset[int]:
    """The union of every source that says what ends a text: configs (model, generation), tokenizer, chat template."""
    found = {tokenizer.eos_token_id}
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
    special = tokenizer.get_added_vocab()
    template = tokenizer.chat_template or ""
    found |= {special[token] for token in _TURN_ENDS if token in special and token in str(template)}
    return frozenset(found - {None})
