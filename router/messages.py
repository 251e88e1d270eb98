"""Where what clients say and hear (`specdecode.requests`) meets protobuf on the router's side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from specdecode.errors import InvalidArgumentError, SpecdecodeError
from specdecode.requests import (
    ChatPrompt,
    EmittedToken,
    GenerateRequest,
    Prompt,
    ReplicaStatus,
    RouterStatus,
    SamplingOptions,
    SpeculationMode,
    SpeculationOptions,
    TextPrompt,
    TokenPrompt,
)
from specdecode.types import FinishReason, RoundRecord, Usage
from specdecode.v1 import router_service_pb2 as pb
from specdecode.wire import (
    FINISH_REASONS,
    ORIGINS,
    error_to_proto,
    generate_request_from_proto,
    round_record_to_proto,
    router_status_to_proto,
    token_logprobs_to_proto,
    usage_to_proto,
)

__all__ = [
    "ChatPrompt",
    "EmittedToken",
    "GenerateRequest",
    "Piece",
    "Prompt",
    "ReplicaStatus",
    "RouterStatus",
    "SamplingOptions",
    "SpeculationMode",
    "SpeculationOptions",
    "TextPrompt",
    "TokenPrompt",
    "generate_request_from_proto",
    "parse_generate_request",
    "piece_to_proto",
    "router_status_to_proto",
]


@dataclass
class Piece:
    """What is said of one choice at once; `text` is the text of `tokens`."""

    choice: int
    text: str = ""
    tokens: list[EmittedToken] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    usage: Usage | None = None
    """On the last piece of the choice."""
    error: SpecdecodeError | None = None
    """Instead of a finish reason, when this choice alone failed."""


def parse_generate_request(data: bytes) -> Any:
    """The protobuf message in these bytes.

    Raises:
        InvalidArgumentError: they are no GenerateRequest; names the string field that is not UTF-8, if any.
    """
    try:
        return pb.GenerateRequest.FromString(data)
    except DecodeError as error:
        field_path = next(_fields_not_utf8(data, pb.GenerateRequest.DESCRIPTOR, ""), None)
        if field_path is not None:
            raise InvalidArgumentError.of(field_path, "is not valid UTF-8") from error
        raise InvalidArgumentError.of("request", f"is not a GenerateRequest: {error}") from error


def _fields_not_utf8(data: bytes, descriptor: Any, prefix: str) -> Iterator[str]:
    """Paths of string fields whose bytes are not UTF-8, found by reading the message without its schema."""
    carrier = pb.GetStatusRequest()  # it has no fields, so that all of them are unknown
    try:
        carrier.ParseFromString(data)
    except DecodeError:
        return
    unknowns: Any = UnknownFieldSet(carrier)
    for unknown in unknowns:
        known = descriptor.fields_by_number.get(unknown.field_number)
        if known is None or not isinstance(unknown.data, bytes):
            continue
        if known.type == known.TYPE_MESSAGE:
            yield from _fields_not_utf8(unknown.data, known.message_type, f"{prefix}{known.name}.")
        elif known.type == known.TYPE_STRING and not _is_utf8(unknown.data):
            yield prefix + known.name


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def piece_to_proto(request_id: str, piece: Piece) -> Any:
    return pb.GenerateResponse(
        request_id=request_id,
        choice=piece.choice,
        text=piece.text,
        tokens=[
            pb.EmittedToken(
                token_id=token_id,
                origin=ORIGINS.to_proto(origin),
                logprobs=None if logprobs is None else token_logprobs_to_proto(logprobs),
            )
            for token_id, origin, logprobs in piece.tokens
        ],
        rounds=[round_record_to_proto(record) for record in piece.rounds],
        finish_reason=FINISH_REASONS.to_proto(piece.finish_reason),
        stop=piece.stop or "",
        usage=None if piece.usage is None else usage_to_proto(piece.usage),
        error=None if piece.error is None else error_to_proto(piece.error),
    )
