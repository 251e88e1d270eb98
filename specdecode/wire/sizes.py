"""Frames as messages that may be sent: what is too large for one message is told in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from specdecode.types import DecodeFrame, DraftFrame, DraftsFrame, StepFrame

Frame = TypeVar("Frame", DecodeFrame, DraftFrame, DraftsFrame, StepFrame)


def messages_within(
    max_bytes: int, frame: Frame, to_proto: Callable[[Frame], Any]
) -> Iterator[tuple[Frame, Any]]:
    """Parts of a frame, in order, each with its message of at most `max_bytes`.

    A part of one entry is told as it is, whatever its size: the caller knows what to do with one too large.
    """
    message = to_proto(frame)
    halves = _halves(frame) if message.ByteSize() > max_bytes else ()
    if not halves:
        yield frame, message
    for half in halves:
        yield from messages_within(max_bytes, half, to_proto)


def _halves(frame: Frame) -> tuple[Frame, ...]:
    """Two frames with half of the entries each, in order, and all else the same; none of a single entry."""
    entries: dict[str, tuple[Any, ...]] = {
        field.name: value for field in fields(frame) if isinstance(value := getattr(frame, field.name), tuple)
    }
    total = sum(map(len, entries.values()))
    if total < 2:
        return ()
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    left = total // 2
    for name, values in entries.items():
        first[name], second[name] = values[:left], values[left:]
        left -= len(first[name])
    return replace(frame, **first), replace(frame, **second)
