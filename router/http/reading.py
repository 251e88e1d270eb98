"""Bodies: taken in up to a limit, and read beside the event loop where they are large."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from router.http.errors import RefusedError, refused
from router.parsing import LARGE_BYTES
from specdecode.errors import CancelledError, FieldViolation, InvalidArgumentError

_MAX_VIOLATIONS = 8

B = TypeVar("B", bound=BaseModel)


async def read(request: Request, kind: type[B], max_bytes: int) -> B:
    """The body.

    Raises:
        RefusedError: it is too large, or not said to be JSON.
        InvalidArgumentError: it is none of this kind; names the fields.
        CancelledError: the client left before it was whole.
    """
    # Forms of any page may be posted to any address: browsers ask before they send JSON somewhere else.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = f"content-type is {content_type!r}; application/json is needed"
        raise RefusedError(refused(415, message, "unsupported_media_type"))
    data = await _take_in(request, max_bytes)
    if len(data) < LARGE_BYTES:
        return _parse(kind, data)
    return await asyncio.to_thread(_parse, kind, data)


async def _take_in(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise CancelledError("the client left before its request was whole") from None
    return bytes(data)


def _too_large(max_bytes: int) -> RefusedError:
    message = f"the body is too large; at most {max_bytes} bytes"
    return RefusedError(refused(413, message, "request_too_large"))


def _parse(kind: type[B], data: bytes) -> B:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        violations = tuple(
            FieldViolation(_path(entry["loc"]), entry["msg"].removeprefix("Value error, "))
            for entry in found[:_MAX_VIOLATIONS]
        )
    message = "; ".join(f"{entry.field}: {entry.description}" for entry in violations)
    raise InvalidArgumentError(message, violations=violations)


def _path(location: Sequence[int | str]) -> str:
    """As clients write it: messages[0].content."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "body"
