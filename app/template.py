"""Messages in the model's own chat template, also where that knows no system role or insists on alternating turns."""

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = dict[str, str]


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """The text of `messages` up to where the answer begins.

    What a template refuses is offered again with turns of one role joined, then with the system message at the head of
    the first user turn. ValueError, in the template's words, if it refuses that too.
    """
    if not tokenizer.chat_template:
        raise ValueError("the model has no chat template: continue plain text instead (--raw, or /v1/completions)")
    joined = _joined(messages)
    refused: TemplateError | None = None
    for form in (list(messages), joined, _without_system(joined)):
        try:
            text = tokenizer.apply_chat_template(form, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            refused = refused or error
            continue
        if all(each["content"].strip() in text for each in form if each["role"] == "system"):
            return text  # a template that drops the system message without a word gets it in the user's turn
    raise ValueError(f"the model's chat template refuses the messages: {refused}") from refused


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Neighbouring messages of one role as one."""
    turns: list[Message] = []
    for message in messages:
        if turns and turns[-1]["role"] == message["role"]:
            turns[-1] = {**message, "content": f"{turns[-1]['content']}\n\n{message['content']}"}
        else:
            turns.append(message)
    return turns


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """System messages at the head of the user turn that follows; alone they are one."""
    turns: list[Message] = [
        {**message, "role": "user"} if message["role"] == "system" else message for message in messages
    ]
    return _joined(turns)
