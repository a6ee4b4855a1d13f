"""What one answer cost, summed over its steps, and how that reads on a status line."""

from dataclasses import dataclass

from app.sizes import format_size


@dataclass(frozen=True)
class Stats:
    """Counts, seconds and bytes of one answer so far.

    tokens: emitted ones, an end-of-text token included. passes: the target's, the prefill included.
    cached_tokens: how many of the prompt's were not computed again. prefill_s: until the first pass was done.
    draft_paused: passes without guesses because the draft did not pay (see Pace).
    elapsed_s: wall-clock time since the answer was asked for. finish_reason: None while it goes on.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    prefill_s: float = 0.0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_paused: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    elapsed_s: float = 0.0
    streamed_bytes: int = 0
    finish_reason: str | None = None

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def s_per_pass(self) -> float:
        """Seconds of a target pass; drafting is counted apart."""
        return self.verify_s / self.passes if self.passes else 0.0

    @property
    def link_bps(self) -> float:
        """Streamed bytes per second of the whole answer: drafting too, since the slots fill while it runs."""
        return self.streamed_bytes / self.elapsed_s if self.elapsed_s else 0.0


def status_line(stats: Stats, raw_link_bps: float | None, peak_bytes: int, limit_bytes: int | None) -> str:
    """One line for standard error; of another server's answer, whose passes are not known, what can be told."""
    if not stats.passes:
        first = f"first after {stats.prefill_s:.2f} s"
        return f"{stats.tokens} tokens | {stats.tokens_per_s:.2f} tokens/s | {first}"
    parts = [
        f"{stats.tokens} tokens",
        f"{stats.tokens_per_s:.2f} tokens/s",
        f"{stats.tokens_per_pass:.2f} tokens/pass",
        f"{stats.s_per_pass:.3f} s/pass",
        f"{format_size(stats.streamed_bytes)} streamed",
    ]
    if stats.draft_paused:
        parts.append(f"draft paused for {stats.draft_paused} of {stats.passes} passes")
    if raw_link_bps:
        share = 100 * stats.link_bps / raw_link_bps
        parts.append(f"link {stats.link_bps / 1e9:.2f} GB/s ({share:.0f} % of {raw_link_bps / 1e9:.2f})")
    of_limit = f" of {format_size(limit_bytes)}" if limit_bytes else ""
    parts.append(f"peak {format_size(peak_bytes)}{of_limit}")
    return " | ".join(parts)
