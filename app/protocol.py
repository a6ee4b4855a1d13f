"""What OpenAI's clients send: checked field by field, so that nothing is accepted that would do nothing."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.settings import Settings
from app.spelling import nearest
from app.template import Message
from specexec.sampling import SamplingParams

# Fields that may be there as long as they ask for nothing, and those that only label a request.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
_LABELS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
_ECHOED = {"refusal": (None,), "annotations": ([],), "tool_calls": ([],), "audio": (None,), "function_call": (None,)}
_LONGEST_STOP = 16


class Refused(ValueError):  # noqa: N818 (read as a sentence: raise Refused)
    """A request that cannot be done; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn; `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] = ""
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_echo(cls, fields: Any) -> Any:
        """Answers come back as the client kept them, with fields that say nothing."""
        return _without_neutral(fields, _ECHOED) if isinstance(fields, dict) else fields

    def plain(self) -> Message:
        """The message as templates know it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class StreamOptions(_Body):
    """What a stream ends with."""

    include_usage: bool = False


class _Generation(_Body):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: list[str] = []
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    min_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in _without_neutral(fields, _NEUTRAL).items() if name not in _LABELS}

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, stop: Any) -> Any:
        texts = [stop] if isinstance(stop, str) else stop
        if isinstance(texts, list) and (not all(texts) or len(texts) > _LONGEST_STOP):
            raise ValueError(f"give at most {_LONGEST_STOP} texts, none of them empty")
        return texts

    def params(self, settings: Settings, *, seed: int) -> SamplingParams:
        """How to draw; `settings` say what the request leaves open. Refused names the field that is out of range."""
        repeat = self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty
        given = {
            "temperature": (self.temperature, settings.temp),
            "top_p": (self.top_p, settings.top_p),
            "top_k": (None if self.top_k is None else max(self.top_k, 0), settings.top_k),  # -1: off, in some clients
            "min_p": (self.min_p, settings.min_p),
            "presence_penalty": (self.presence_penalty, settings.presence_penalty),
            "frequency_penalty": (self.frequency_penalty, settings.frequency_penalty),
            "repetition_penalty": (repeat, settings.repeat_penalty),
            "min_tokens": (self.min_tokens, settings.min_tokens),
            "seed": (None if self.seed is None else self.seed % 2**63, seed),
        }
        try:
            return SamplingParams(**{name: own if own is not None else other for name, (own, other) in given.items()})
        except ValueError as error:
            raise Refused(str(error), str(error).partition(" ")[0]) from None


class ChatRequest(_Generation):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Generation):
    """The body of /v1/completions: one prompt, as text or token ids."""

    prompt: str | list[int]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _single(cls, prompt: Any) -> Any:
        return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int) else prompt

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens


GenerationRequest = ChatRequest | CompletionRequest


def parse(kind: type[GenerationRequest], body: bytes) -> GenerationRequest:
    """A checked request; Refused names the field at fault and, for one that is unknown, the nearest that is not."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        first = max(found, key=lambda each: len(each["loc"]))  # the most precise one, where a union fails several ways
        param = _path([part for part in first["loc"] if not _is_variant(part)])
        if first["type"] == "extra_forbidden":
            known = set(kind.model_fields)
            hint = "" if first["loc"][0] in _NEUTRAL or len(first["loc"]) > 1 else nearest(str(first["loc"][0]), known)
            raise Refused(f"{param} is not supported{hint}", param) from None
        message = first["msg"].removeprefix("Value error, ")
        raise Refused(f"{param}: {message}" if param else message, param or None) from None


def _without_neutral(fields: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if value is not None and not any(value == each and type(value) is type(each) for each in neutral.get(name, ()))
    }


def _path(parts: list[int | str]) -> str:
    """messages, 0, role -> messages[0].role"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def _is_variant(part: int | str) -> bool:
    """Pydantic adds the kind of a union's member to where an error is."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)
