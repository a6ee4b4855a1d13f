"""Leaves out what a model thinks aloud between <think> and </think>, and the empty lines behind it."""

OPEN, _CLOSE = "<think>", "</think>"


class ThinkingFilter:
    """Text in pieces in, the same without thoughts out; a piece that may be part of a mark waits for the next."""

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = self._is_after = False

    def push(self, text: str) -> str:
        """What of the text so far can be shown."""
        self._held += text
        shown = ""
        while True:
            mark = _CLOSE if self._is_inside else OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            shown += self._visible(before)
            self._held, self._is_after, self._is_inside = after, self._is_inside, not self._is_inside
        kept = max((n for n in range(1, len(mark)) if self._held.endswith(mark[:n])), default=0)
        ready, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown + self._visible(ready)

    def flush(self) -> str:
        """The rest, when nothing more comes."""
        return self._visible(self._held)

    def _visible(self, text: str) -> str:
        if self._is_inside:
            return ""
        if self._is_after:
            text = text.lstrip("\n")
            self._is_after = not text
        return text
