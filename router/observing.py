"""One request as traces and metrics see it, whichever front it came by."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.metrics import RouterMetrics
from router.request import Request
from router.request_span import end_span
from router.tracing import RequestTrace, TraceRules
from specdecode.config import RouterSettings
from specdecode.errors import SpecdecodeError
from specdecode.requests import GenerateRequest
from specdecode.telemetry import Tracing


@dataclass
class Observed:
    """A request while it runs.

    Attributes:
        trace: what it is told in; None: nothing is.
        request: what runs; None before, and for one that is refused.
    """

    trace: RequestTrace | None
    metrics: RouterMetrics
    request: Request | None = None
    _began: float = field(default_factory=time.monotonic)
    _has_said: bool = False

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.monotonic() - self._began

    def said(self) -> None:
        """A piece goes to the client."""
        if self._has_said:
            return
        self._has_said = True
        if self.trace is not None:
            self.trace.said()
        self.metrics.said_first(self.seconds, None if self.trace is None else self.trace.told)


class Observer:
    """Watches requests.

    Args:
        tracing: where spans go; None: nowhere.
        metrics: counts them.
    """

    def __init__(self, settings: RouterSettings, tracing: Tracing | None, metrics: RouterMetrics) -> None:
        self._model = settings.model
        self._rules = TraceRules.of(settings)
        self._tracing = tracing
        self._metrics = metrics

    @contextmanager
    def watch(self, asked: GenerateRequest, traceparent: str) -> Iterator[Observed]:
        """Around all that is done for a request; an error that comes out of it is its refusal."""
        trace = None
        if self._tracing is not None:
            trace = RequestTrace.begin(self._tracing, self._rules, traceparent, asked.trace_detail)
        observed = Observed(trace, self._metrics)
        refusal: SpecdecodeError | None = None
        try:
            yield observed
        except SpecdecodeError as error:
            refusal = error
            raise
        finally:
            told = None if trace is None else trace.told
            self._metrics.ended(observed.request, observed.seconds, told)
            if trace is not None:
                end_span(trace, asked, self._model, observed.request, refusal)
