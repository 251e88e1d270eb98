"""Errors in OpenAI's shape, with the status that its clients act on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from specdecode.errors import FieldViolation, InvalidArgumentError, Reason, SpecdecodeError

CLIENT_GONE = 499
"""Nobody reads it; it stands in logs."""

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: CLIENT_GONE,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# Trying again, which clients do by themselves at 429, would not help.
_STATUSES_BY_REASON = {Reason.KV_TOO_SMALL: 400, Reason.INVALID_ARGUMENT: 400}
# What clients look for.
_CODES = {
    Reason.CONTEXT_EXCEEDED: "context_length_exceeded",
    Reason.API_KEY_INVALID: "invalid_api_key",
    Reason.RATE_LIMITED: "rate_limit_exceeded",
}
_TYPES = {404: "not_found_error", 429: "rate_limit_error"}

_PARAMS = (
    (re.compile(r"(text|token_ids(\.ids)?|prompt)\b"), "prompt"),
    (re.compile(r"chat\.(?=messages|tools)"), ""),
    (re.compile(r"chat\b"), "messages"),
    (re.compile(r"sampling\."), ""),
    (re.compile(r"speculation\."), "speculative_decoding."),
)


@dataclass(frozen=True)
class Refusal:
    """An error as it is sent."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class RefusedError(Exception):
    """HTTP itself has a word for what is wrong."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.status)
        self.refusal = refusal


def refusal_of(error: SpecdecodeError) -> Refusal:
    """What a client is told."""
    status = _STATUSES_BY_REASON.get(error.reason) or _STATUSES.get(error.code, 500)
    param = error.violations[0].field if error.violations else None
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    code = _CODES.get(error.reason, error.reason.lower())
    return refused(status, error.message, code, param, headers)


def refused(
    status: int,
    message: str,
    code: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Refusal:
    """An error of HTTP itself; one of the router's goes by `refusal_of`."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return Refusal(status, body, headers or {})


def in_clients_words(error: SpecdecodeError, names: Mapping[str, str]) -> SpecdecodeError:
    """The error with fields called what the body calls them.

    Args:
        names: of fields that one API calls otherwise.
    """
    if not error.violations:
        return error
    violations = tuple(
        FieldViolation(_param_of(entry.field, names), entry.description) for entry in error.violations
    )
    message = "; ".join(f"{entry.field}: {entry.description}" for entry in violations)
    return InvalidArgumentError(message, reason=error.reason, violations=violations)


def _param_of(field: str, names: Mapping[str, str]) -> str:
    for pattern, replacement in _PARAMS:
        if (match := pattern.match(field)) is not None:
            field = replacement + field[match.end() :]
            break
    return names.get(field, field)
