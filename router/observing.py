"""What is noted of requests, and who is told: the trace, the metrics, the record and the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from router.metrics import RouterMetrics, outcome
from router.recorder import Recorder, RoundTimes
from router.request import Request, Round
from router.request_span import end_span, total_usage
from router.tracing import RequestTrace, TraceRules
from specdecode.config import RouterSettings
from specdecode.errors import SpecdecodeError
from specdecode.figures import Figures
from specdecode.requests import GenerateRequest, RouterStatus
from specdecode.telemetry import TraceContext, Tracing
from specdecode.telemetry.metrics import Family, Sample, counter
from specdecode.types import StepResult

logger = logging.getLogger(__name__)


class Observer:
    """One router's; within the event loop only.

    Args:
        settings: say what is wanted.
        tracing: where spans go, closed by `close`; None: nowhere.
        draft_model: names the draft model that is served, "" without one.

    Raises:
        InvalidArgumentError: the file of records can't be written.
    """

    def __init__(
        self, settings: RouterSettings, tracing: Tracing | None, draft_model: Callable[[], str]
    ) -> None:
        self.model = settings.model
        self.draft_model = draft_model
        self.tracing = tracing
        self.rules = TraceRules.of(settings)
        self.metrics = RouterMetrics()
        self.recorder = None if settings.record_path is None else Recorder(settings)

    @contextmanager
    def watch(self, asked: GenerateRequest, traceparent: str) -> Iterator[Observed]:
        """Around all that is done for a request; an error that comes out of it is its refusal."""
        observed = Observed(self, asked, traceparent)
        refusal: SpecdecodeError | None = None
        try:
            yield observed
        except SpecdecodeError as error:
            refusal = error
            raise
        finally:
            observed.ended(refusal)

    def families(self, figures: Sequence[Figures], status: RouterStatus) -> list[Family]:
        """What is told to whoever collects metrics."""
        families = self.metrics.families(figures, status)
        if self.tracing is not None:
            spans = (("sent", self.tracing.num_sent), ("dropped", self.tracing.num_dropped))
            samples = (Sample(count, {"state": state}) for state, count in spans)
            families.append(counter("specdecode_trace_spans", "Spans for the collector", *samples))
        return families

    async def close(self) -> None:
        """Sends and writes what waits."""
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


class Observed:
    """One request.

    Attributes:
        trace: None where nothing is traced.
        request: what runs; None before, and for one that is refused.
    """

    def __init__(self, observer: Observer, asked: GenerateRequest, traceparent: str) -> None:
        tracing = observer.tracing
        self.trace: RequestTrace | None = None
        if tracing is not None:
            self.trace = RequestTrace.begin(tracing, observer.rules, traceparent, asked.trace_detail)
        self.request: Request | None = None
        self._observer = observer
        self._asked = asked
        self._times = None if observer.recorder is None else RoundTimes()
        self._began = time.monotonic()
        self._first_said: float | None = None

    @property
    def _context(self) -> TraceContext | None:
        return None if self.trace is None else self.trace.told

    def took(self, result: StepResult, round_: Round, num_kept: int, seconds: float | None) -> None:
        """A result of which so many tokens were kept; `seconds` since the one before, None for the first."""
        self._observer.metrics.took(result, round_, num_kept, seconds)
        if self._times is not None:
            self._times.took(result, round_, num_kept, seconds)

    def said(self) -> None:
        """The client gets a piece."""
        if self._first_said is not None:
            return
        self._first_said = time.monotonic()
        self._observer.metrics.said_first(self._first_said - self._began, self._context)
        if self.trace is not None:
            self.trace.said(self._first_said)

    def ended(self, refusal: SpecdecodeError | None) -> None:
        """The request has ended, or was refused."""
        observer, request, seconds = self._observer, self.request, time.monotonic() - self._began
        observer.metrics.ended(request, seconds, self._context)
        if self.trace is not None:
            end_span(self.trace, self._asked, observer.model, request, refusal)
        if request is not None and observer.recorder is not None and self._times is not None:
            record = observer.recorder.record(
                request, self._times, observer.model, observer.draft_model(), self._began, self._first_said
            )
            observer.recorder.write(record)
        _log(request, refusal, self.trace, seconds)


def _log(
    request: Request | None, refusal: SpecdecodeError | None, trace: RequestTrace | None, seconds: float
) -> None:
    """One line a request."""
    if not logger.isEnabledFor(logging.INFO):
        return
    told: dict[str, object] = {"outcome": outcome(request), "seconds": round(seconds, 4)}
    if trace is not None:
        told["trace_id"] = f"{trace.context.trace_id:032x}"
    if request is None:
        told["error"] = None if refusal is None else refusal.reason.value
        logger.info("request %s", _words(told), extra={"fields": told})
        return
    usage, errors = total_usage(request), [c.error for c in request.choices if c.error is not None]
    told |= {
        "request_id": request.id,
        "prompt_tokens": usage.num_prompt_tokens,
        "emitted": usage.num_emitted,
        "rounds": usage.num_rounds,
        "drafted": usage.num_drafted,
        "accepted": usage.num_accepted,
        "failovers": usage.num_failovers,
    }
    if errors:
        told["error"] = errors[0].reason.value
    logger.info("request %s", _words(told), extra={"fields": told})


def _words(told: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in told.items() if value is not None)
