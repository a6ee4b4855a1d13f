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
            turns = [_turn(each, at) for at, each in enumerate(_messages(json.loads(path.read_text(encoding="utf-8"))))]
        except ValueError as error:
            raise ValueError(f"{path} is not a saved conversation: {error}") from error
        system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else None
        return cls(system, turns)


def _messages(saved: object) -> list[object]:
    messages = saved.get("messages") if isinstance(saved, dict) else None
    if not isinstance(messages, list):
        raise ValueError('it must be {"messages": [...]}')
    return messages


def _turn(message: object, at: int) -> Message:
    roles = ("user", "assistant") if at else ("system", "user", "assistant")
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if role not in roles or not isinstance(content, str):
        raise ValueError(f"message {at + 1} must have a role ({', '.join(roles)}) and a content that is a text")
    return {"role": role, "content": content}
