"""A conversation: its system message, its turns, and the file that keeps it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from app.template import Message


@dataclass
class Conversation:
    """What was said. `messages` is what a template gets."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def ask(self, text: str) -> None:
        """Adds a question."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Adds an answer, maybe one that was stopped."""
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Removes the last question with its answer; returns the question, None where there is none."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def save(self, path: Path) -> None:
        """Writes JSON, whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Conversation":
        """Reads what `save` wrote; ValueError for anything else."""
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            turns = [{"role": each["role"], "content": each["content"]} for each in messages]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a saved conversation: {error}") from error
        if not all(isinstance(text, str) for turn in turns for text in turn.values()):
            raise ValueError(f"{path} is not a saved conversation: roles and contents must be texts")
        system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else None
        return cls(system, turns)
