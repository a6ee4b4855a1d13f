"""Token ids to text as they come: never half a character, never part of a stop string."""

from collections.abc import Callable, Sequence

_HALF = "\ufffd"  # what a decoder makes of bytes that are no character yet


class TextStream:
    """The text of one answer. What was pushed and flushed joins to the text decoded at once, cut at the first stop.

    decode: ids of the whole answer -> its text. stop: the answer ends before the first of these.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._num_emitted = 0
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Adds a token; returns the text that nothing to come can change."""
        self._ids.append(token)
        text = self._decode(self._ids)
        while text.endswith(_HALF):
            text = text[:-1]
        return self._emit(text, held=True)

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        return self._emit(self._decode(self._ids), held=False)

    def _emit(self, text: str, *, held: bool) -> str:
        if self.is_stopped:
            return ""
        found = [at for each in self._stop if (at := text.find(each, self._num_emitted)) >= 0]
        self.is_stopped = bool(found)
        end = min(found) if found else len(text) - (self._held_back(text) if held else 0)
        new = text[self._num_emitted : end]
        self._num_emitted += len(new)
        return new

    def _held_back(self, text: str) -> int:
        """Length of the longest ending of `text` that could begin a stop string."""
        starts = (each[:length] for each in self._stop for length in range(1, len(each)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)
