"""What clients send: bodies of OpenAI's API and vLLM's extensions of it, one class each.

Only types are checked here; ranges are where the gRPC front's are, in `router.validation`. Fields that no
class knows are kept in `model_extra`: `router.http.unserved` says which of those are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from specdecode.requests import (
    MAX_BIAS,
    MAX_CHAT_MESSAGES,
    MAX_LISTED_TOKEN_IDS,
    MAX_TOOLS,
    SpeculationMode,
    Tier,
)
from specdecode.types import DrafterKind, Method

MAX_PROMPTS = 128
"""Prompts of one body."""

_ID = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_PROMPTS_SCHEMA = {
    "oneOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_STOP_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


def _prompts(value: object) -> object:
    """One prompt or many, as many; each a text or ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of token ids, or a list of one of these")
    if all(map(_is_id, value)):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts; at most {MAX_PROMPTS}")
    for index, entry in enumerate(value):
        if not isinstance(entry, str) and not (isinstance(entry, list) and all(map(_is_id, entry))):
            raise ValueError(f"entry {index} is neither a string nor a list of token ids")
    return tuple(entry if isinstance(entry, str) else tuple(entry) for entry in value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stops(value: object) -> object:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _text(value: object) -> object:
    """Content of a message: its text, or its parts of type text, one after another on lines of their own."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    return "\n".join(_part(index, part) for index, part in enumerate(value))


def _part(index: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("text", "refusal"):
        raise ValueError(f"part {index} is of type {kind!r}; only parts of type 'text' are served")
    text = part.get(str(kind))
    if not isinstance(text, str):
        raise ValueError(f"part {index} has no {kind!r}, a string")
    return text


Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    BeforeValidator(_prompts),
    Field(strict=False),
    WithJsonSchema(_PROMPTS_SCHEMA),
]
Stops = Annotated[tuple[str, ...], BeforeValidator(_stops), Field(strict=False), WithJsonSchema(_STOP_SCHEMA)]
Ids = Annotated[tuple[int, ...], Field(strict=False, max_length=MAX_LISTED_TOKEN_IDS)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Content = Annotated[
    str,
    BeforeValidator(_text),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]


class SpeculativeDecoding(BaseModel):
    """How tokens are drafted for a request, and what is told of it; what is absent is the router's choice."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: SpeculationMode = SpeculationMode.AUTO
    num_draft_tokens: int | None = Field(None, strict=True)
    """Cap on γ, 0 to 32."""
    drafter: DrafterKind | None = None
    method: Method | None = None
    min_acceptance: float | None = Field(None, strict=True)
    tier: Tier = Tier.INTERACTIVE
    traffic_class: str = Field("", strict=True)
    remember_output: bool = Field(True, strict=True)
    include_tokens: bool = Field(False, strict=True)
    """Tell each token's id, text and origin."""
    include_rounds: bool = Field(False, strict=True)
    """Tell what each round drafted, and what came of it."""


class StreamOptions(_Body):
    """What a stream tells beside the text."""

    include_usage: bool = False


class _GenerationBody(_Body):
    """What both APIs have."""

    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: Stops = ()
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Bias] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Ids | None = None
    allowed_token_ids: Ids | None = None
    cache_salt: str | None = None
    speculative_decoding: SpeculativeDecoding | None = None


class CompletionBody(_GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None


class FunctionCall(_Body):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str = ""


class MessageToolCall(_Body):
    """A call of an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Body):
    """A message of a chat."""

    role: str
    content: Content = ""
    tool_calls: Annotated[tuple[MessageToolCall, ...], Field(strict=False)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


Messages = Annotated[tuple[Message, ...], Field(strict=False, min_length=1, max_length=MAX_CHAT_MESSAGES)]


class Function(_Body):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(_Body):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class ChatBody(_GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: Annotated[tuple[ToolBody, ...], Field(strict=False, max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    response_format: dict[str, Any] | None = None


class TokenizeBody(_Body):
    """`POST /tokenize`: a prompt, or messages."""

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[tuple[ToolBody, ...], Field(strict=False, max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(_Body):
    """`POST /detokenize`."""

    model: str = ""
    tokens: Ids
