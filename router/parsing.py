"""Bytes of a request, with the field named that makes them none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from specdecode.errors import InvalidArgumentError
from specdecode.v1 import router_service_pb2 as pb


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
