"""Counters and timings of a server, in Prometheus' format; each server has its own registry."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from app.session import Chunk
from app.stats import Stats
from app.worker import Outcome

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_PASS = (1, 2, 3, 4, 6, 8, 12, 16, 32)


class Metrics:
    """What `/metrics` shows. `count_running`, `count_waiting` and `resident_share` are asked when it is read."""

    def __init__(
        self,
        count_running: Callable[[], float],
        count_waiting: Callable[[], float],
        resident_share: Callable[[], float],
    ) -> None:
        self._registry = CollectorRegistry()
        self._gauge("requests_running", "Requests being answered").set_function(count_running)
        self._gauge("requests_waiting", "Requests in the queue").set_function(count_waiting)
        self._gauge("resident_layers_ratio", "Share of the target's layers in memory").set_function(resident_share)
        self._first = self._histogram("time_to_first_token_seconds", "From request to first token", _SECONDS)
        self._gap = self._histogram("inter_token_latency_seconds", "Seconds per token after the first pass", _SECONDS)
        self._per_pass = self._histogram("tokens_per_pass", "Tokens that one target pass gave", _PER_PASS)
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("generated_tokens", "Tokens of answers")
        self._reused = self._counter("prefix_tokens_reused", "Tokens of prompts whose rows were at hand")
        self._drafted = self._counter("drafted_tokens", "Nodes of token trees")
        self._accepted = self._counter("accepted_tokens", "Nodes that became tokens")
        self._passes = self._counter("target_passes", "Passes of the target")
        self._streamed = self._counter("streamed_bytes", "Bytes of weights that crossed the link")
        self._link = self._gauge("link_bytes_per_second", "Rate of the link over the last answer")

    def observed(self, deliver: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
        """`deliver`, with every chunk counted on its way."""
        last_s = time.perf_counter()
        last_bytes = 0

        def observe(outcome: Outcome) -> None:
            nonlocal last_s, last_bytes
            if isinstance(outcome, Chunk):
                now = time.perf_counter()
                self._count(outcome, now - last_s, outcome.stats.streamed_bytes - last_bytes)
                last_s, last_bytes = now, outcome.stats.streamed_bytes
            deliver(outcome)

        return observe

    def _count(self, chunk: Chunk, elapsed_s: float, streamed_bytes: int) -> None:
        stats, step = chunk.stats, chunk.step
        if step is None:
            self._count_whole(stats)
            return
        if stats.passes == 1:
            self._first.observe(elapsed_s)
            self._prompt.inc(stats.prompt_tokens)
            self._reused.inc(stats.cached_tokens)
        else:
            self._gap.observe(elapsed_s / len(step.tokens))
        self._per_pass.observe(len(step.tokens))
        self._generated.inc(len(step.tokens))
        self._drafted.inc(step.drafted)
        self._accepted.inc(step.accepted)
        self._passes.inc()
        self._streamed.inc(streamed_bytes)
        self._link.set(stats.link_bps)

    def _count_whole(self, stats: Stats) -> None:
        """An answer of another server, which counts at its end."""
        if stats.finish_reason:
            self._first.observe(stats.prefill_s)
            self._prompt.inc(stats.prompt_tokens)
            self._reused.inc(stats.cached_tokens)
            self._generated.inc(stats.tokens)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"specexec_{name}", what, registry=self._registry)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"specexec_{name}", what, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"specexec_{name}", what, registry=self._registry, buckets=buckets)
