"""From messages to text: chat template, engine steps, decoded chunks, and what each answer cost."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.cancel import leave_between_layers
from app.stats import Stats
from app.template import Message, render
from app.textstream import TextStream
from app.thinking import OPEN
from specexec.budget import Pace
from specexec.drafters import Drafter
from specexec.engine import Step, TokenLogprob, generate
from specexec.lm import CachedLM
from specexec.sampling import SamplingParams, make_sampler
from specexec.verify import verify

_OPENING_TOKENS = 16
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")


@dataclass(frozen=True)
class Chunk:
    """A piece of the answer, maybe empty, and the sums up to it; the last chunk's stats have a finish_reason.

    step: the pass that it came from, None of another server's. logprobs: an entry per token of the answer, if asked
    for; end-of-text has none.
    """

    text: str
    stats: Stats
    step: Step | None
    logprobs: tuple[TokenLogprob, ...] = ()


def _never() -> bool:
    return False


class Session:
    """A target, a drafter and a tokenizer that answer prompts one after another.

    ctx: the most tokens of prompt and answer together. budget: the most nodes of a tree.
    stop_ids: tokens that end an answer. count_streamed: bytes that have crossed the link so far.
    walk: see generate(). note: told once, at the end of an answer, that the draft does not pay.
    """

    def __init__(
        self,
        target: CachedLM,
        drafter: Drafter | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ctx: int,
        budget: int | Pace,
        stop_ids: frozenset[int],
        count_streamed: Callable[[], int] = lambda: 0,
        walk: Callable[..., list[int]] = verify,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.target, self.drafter, self._tokenizer = target, drafter, tokenizer
        self.ctx, self._budget, self.stop_ids = ctx, budget, stop_ids
        self._count_streamed, self._walk, self._note = count_streamed, walk, note
        self._is_pause_told = False
        self._is_cancelled: Callable[[], bool] = _never
        layers = (*target.layers, *(drafter.layers if drafter is not None else ()))
        leave_between_layers(layers, lambda: self._is_cancelled())

    @property
    def _num_paused(self) -> int:
        return self._budget.num_paused if isinstance(self._budget, Pace) and self.drafter is not None else 0

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return self.target.vocab_size

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `messages` in the model's own chat template, up to where the answer begins."""
        ids = self._encode(render(self._tokenizer, messages), add_special_tokens=False)
        # A template may leave the first token to the tokenizer, or write what that adds as well.
        begins = self._tokenizer("")["input_ids"][:1]
        return [*begins, *ids] if begins == [self._tokenizer.bos_token_id] and ids[:1] != begins else ids

    def opening(self, prompt: Sequence[int]) -> str:
        """What a chat's prompt has said of the answer already: `<think>`, where the template opens the thought."""
        end = self._tokenizer.decode(prompt[-_OPENING_TOKENS:], clean_up_tokenization_spaces=False)
        _, mark, rest = end.rpartition(OPEN)
        return mark + rest if mark and not rest.strip() else ""

    def encode_raw(self, text: str) -> list[int]:
        """Token ids of plain text, with whatever the tokenizer puts before it."""
        return self._encode(text, add_special_tokens=True)

    def text_of(self, token: int) -> str:
        """What one token reads as, a special one too."""
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        num_logprobs: int | None = None,
        is_cancelled: Callable[[], bool] = _never,
    ) -> Iterator[Chunk]:
        """Answers `prompt`, a chunk a pass. ValueError if it is empty or leaves no room for an answer within ctx.

        num_logprobs: see generate(). Once `is_cancelled` holds, the pass is left between two layers by Cancelled.
        """
        self.require_room(prompt)
        self._is_cancelled = is_cancelled
        room = self.ctx - len(prompt)
        sampler = make_sampler(params, self.stop_ids, len(prompt))
        text = TextStream(self._decode, stop)
        stats = Stats(prompt_tokens=len(prompt))
        started, streamed_before = time.perf_counter(), self._count_streamed()
        computed_before, paused_before = self.target.num_computed, self._num_paused
        for step in generate(
            self.target,
            self.drafter,
            prompt,
            sampler,
            budget=self._budget,
            max_tokens=min(max_tokens or room, room),
            stop=self.stop_ids,
            num_logprobs=num_logprobs,
            walk=self._walk,
        ):
            if not stats.passes:
                cached = len(prompt) - (self.target.num_computed - computed_before)
                stats = replace(stats, cached_tokens=cached, prefill_s=time.perf_counter() - started)
            pieces, num_used = [], 0
            for token in step.tokens:
                num_used += 1
                if token in self.stop_ids:
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
                draft_paused=self._num_paused - paused_before,
                draft_s=stats.draft_s + step.draft_s,
                verify_s=stats.verify_s + step.verify_s,
                elapsed_s=time.perf_counter() - started,
                streamed_bytes=self._count_streamed() - streamed_before,
                finish_reason="stop" if text.is_stopped else step.finish,
            )
            if stats.finish_reason:
                self._tell_of_pause(stats)
            num_shown = num_used - (step.tokens[num_used - 1] in self.stop_ids)
            yield Chunk("".join(pieces), stats, step, step.logprobs[:num_shown])
            if text.is_stopped:
                return

    def _tell_of_pause(self, stats: Stats) -> None:
        if stats.draft_paused and not self._is_pause_told:
            self._is_pause_told = True
            self._note("draft: switched off for the time being, since it costs more than it brings; it is tried again")

    def require_room(self, prompt: Sequence[int]) -> None:
        """ValueError unless `prompt` has a token, and the context one more for the answer."""
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) >= self.ctx:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.ctx}, at least one of them for the "
                f"answer: shorten the prompt or raise --ctx"
            )

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def begun(opening: str, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """`chunks`, the first one with `opening` before its text."""
    for chunk in chunks:
        yield replace(chunk, text=opening + chunk.text) if opening else chunk
        opening = ""


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
