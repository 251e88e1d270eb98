"""W3C trace context, and ids for what is traced."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

# Version, trace, span, flags; versions to come may have more behind it, which nobody here could read.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(frozen=True)
class TraceContext:
    """A span, as others refer to it.

    Attributes:
        trace_id: 128 bits, not 0.
        span_id: 64 bits, not 0.
        sampled: whether who made the span exports it.
    """

    trace_id: int
    span_id: int
    sampled: bool

    @property
    def traceparent(self) -> str:
        """As it travels."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    def at(self, span_id: int) -> TraceContext:
        """Another span of the same trace."""
        return replace(self, span_id=span_id)


def parse_traceparent(text: str) -> TraceContext | None:
    """The context in a `traceparent`; None where it says none, or something that must not travel on."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None or match[1] == "ff":
        return None
    trace_id, span_id, flags = (int(match[group], 16) for group in (2, 3, 4))
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(flags & _SAMPLED))


def new_trace_id() -> int:
    """128 bits of the system's entropy: ids stay apart also where processes or requests are seeded alike."""
    return _random(16)


def new_span_id() -> int:
    """64 bits, as `new_trace_id`."""
    return _random(8)


def _random(num_bytes: int) -> int:
    while True:
        if number := int.from_bytes(os.urandom(num_bytes)):
            return number
