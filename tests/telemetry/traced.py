"""Services whose traces a collector gets, and what holds of every trace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from specdecode.types import Usage
from tests.services import Services
from tests.telemetry.collector import Collector, Span

PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
UNSAMPLED = PARENT[:-1] + "0"

ROUND, LEASE = "specdecode.round", "specdecode.lease"
DRAFT, VERIFY, DECODE = "specdecode.draft", "specdecode.verify", "specdecode.decode"
PREFILL, STEP = "specdecode.prefill", "specdecode.step"

_PARENTS = {
    ROUND: {None},
    LEASE: {None},
    PREFILL: {None},
    DRAFT: {ROUND},
    VERIFY: {ROUND},
    DECODE: {ROUND, LEASE},
    STEP: {VERIFY},
}
"""What each span is below; None: the request."""


@asynccontextmanager
async def traced(
    spans: Collector,
    model: Path,
    draft_model: Path | None = None,
    *,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    **router: Any,
) -> AsyncIterator[Services]:
    """All services, tracing to `spans`, which has got everything when the block is left."""
    endpoint = {"otlp_endpoint": spans.address}
    target, draft = endpoint | (target or {}), endpoint | (draft or {})
    async with Services.started(
        model, draft_model, target=target, draft=draft, **endpoint, **router
    ) as services:
        yield services


def request_of(spans: Collector) -> Span:
    """The only request's span."""
    (request,) = spans.requests
    return request


def rounds_of(spans: Collector, request: Span) -> list[Span]:
    """Rounds and leases, in their order."""
    return [span for span in spans.children(request) if span.name in (ROUND, LEASE)]


def check(spans: Collector, request: Span, usage: Usage | None) -> None:
    """The trace hangs together, and its sums are the usage that the client was told."""
    own = [span for span in spans.spans if span.trace_id == request.trace_id]
    by_id = {span.span_id: span for span in own}
    assert len(by_id) == len(own), "span ids are unique"
    for span in own:
        if span is not request:
            parent = by_id[span.parent_id]
            assert (None if parent is request else parent.name) in _PARENTS[span.name]
            assert span.began <= span.ended
    rounds = rounds_of(spans, request)
    assert all(earlier.ended <= later.began + 1e-6 for earlier, later in _pairs(rounds))
    for span in rounds:
        below = [child.name for child in spans.children(span)]
        assert below.count(VERIFY) <= (span.name == ROUND and span["rounds"] <= 1)
        assert span["emitted"] == span["accepted"] + span["bonus"] + span["recovered"] + plain(span)
    check_usage([span.attributes for span in rounds], usage)
    if usage is not None:
        assert request.attributes["gen_ai.usage.output_tokens"] == usage.num_emitted
        assert request.attributes["gen_ai.usage.input_tokens"] == usage.num_prompt_tokens
        assert request["failovers"] == usage.num_failovers


def check_usage(rounds: list[dict[str, Any]], usage: Usage | None) -> None:
    """Sums over the attributes of rounds are the usage."""
    if usage is not None:
        sums = [
            sum(attributes[f"specdecode.{name}"] for attributes in rounds)
            for name in ("emitted", "accepted", "bonus", "recovered", "drafted", "rounds")
        ]
        assert sums == [
            usage.num_emitted,
            usage.num_accepted,
            usage.num_bonus,
            usage.num_recovered,
            usage.num_drafted,
            usage.num_rounds,
        ]


def plain(span: Span) -> int:
    """Tokens of a round or lease that came without drafts."""
    return 0 if span["drafted"] else int(span["emitted"])


def _pairs(spans: list[Span]) -> list[tuple[Span, Span]]:
    by_choice: dict[int, list[Span]] = {}
    for span in spans:
        by_choice.setdefault(span["choice"], []).append(span)
    return [pair for own in by_choice.values() for pair in pairwise(own)]
