"""Spans that have ended, as plain data: cheap to note where they happen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Value = str | bool | int | float | tuple[str, ...]
"""What an attribute may be."""

_LARGEST_INT = 2**63 - 1


class EventRecord(NamedTuple):
    """Something that happened within a span; `time` in seconds since the epoch."""

    name: str
    time: float
    attributes: Mapping[str, Value]


class SpanRecord(NamedTuple):
    """One span.

    Attributes:
        parent_id: 0 for the first of its trace.
        began: seconds since the epoch, as `ended`.
        links: (trace id, span id) of spans elsewhere that it has to do with.
        from_remote: whether its parent was made by another process.
        is_server: whether it answers a call.
        error: why it failed; None: it did not.
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    began: float
    ended: float
    attributes: Mapping[str, Value]
    events: tuple[EventRecord, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    from_remote: bool = False
    is_server: bool = False
    error: str | None = None


def present(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    """Attributes without absent ones; integers that OTLP has no room for as text."""
    return {
        name: str(value) if isinstance(value, int) and abs(value) > _LARGEST_INT else value
        for name, value in attributes.items()
        if value is not None
    }
