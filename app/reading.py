"""Questions from a terminal, with history and editing, or from a pipe; triple quotes hold several lines together."""

import sys
from collections.abc import Callable, Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_QUOTES = '"""'
_HINT = "(Ctrl-D or /bye leaves)"


def lines_of(toolbar: Callable[[], str]) -> Iterator[str]:
    """Questions and commands until the input ends. `toolbar` gives the line below a terminal's prompt."""
    read = _terminal_reader(toolbar) if sys.stdin.isatty() and sys.stdout.isatty() else _read_plain
    while True:
        try:
            text = read(">>> ")
            while text.lstrip().startswith(_QUOTES) and text.count(_QUOTES) < 2:
                text += "\n" + read("... ")
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print(_HINT, file=sys.stderr, flush=True)
            continue
        except EOFError:
            return
        if text.lstrip().startswith(_QUOTES):
            text = text.replace(_QUOTES, "").strip("\n")
        yield text


def _read_plain(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _terminal_reader(toolbar: Callable[[], str]) -> Callable[[str], str]:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(key_bindings=keys, bottom_toolbar=toolbar)
    return session.prompt
