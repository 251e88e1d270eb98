"""What fronts read before a request is one: its bytes, and the trace that it is part of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from specdecode.errors import CancelledError, InvalidArgumentError, Reason
from specdecode.v1 import router_service_pb2 as pb

LARGE_BYTES = 16 * 1024
"""From here on a request is read beside the event loop: others' streams go on meanwhile."""

# Version, trace, span, flags; versions to come may have more behind it, which nobody here could read.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def trace_context(said: object) -> str:
    """The trace that a client says it is in; "" where it says none, or what must not travel on."""
    return said if isinstance(said, str) and _TRACEPARENT.fullmatch(said) else ""


def parse_request(message_type: Any, data: bytes) -> Any:
    """The protobuf message of this type in these bytes.

    Raises:
        InvalidArgumentError: they are no such message; names the string field that is not UTF-8, if any.
    """
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        field_path = next(_fields_not_utf8(data, message_type.DESCRIPTOR, ""), None)
        if field_path is not None:
            raise InvalidArgumentError.of(field_path, "is not valid UTF-8") from error
        name = message_type.DESCRIPTOR.name
        raise InvalidArgumentError.of("request", f"is no {name}: {error}") from error


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


def slow_client(seconds: float) -> CancelledError:
    """Why the request of a client that does not read is ended."""
    return CancelledError(f"the client has read nothing for {seconds:g} s", reason=Reason.CLIENT_TOO_SLOW)
