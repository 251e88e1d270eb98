"""Writes a record of each request that ran, beside the event loop, into files that rotate."""

from __future__ import annotations

import logging
import queue
import sys
import time
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path

from router.figures import Tally, merged
from router.metrics import outcome
from router.request import Request, Round
from router.request_span import total_usage
from specdecode.config import RouterSettings
from specdecode.errors import CancelledError, InvalidArgumentError
from specdecode.figures import FigureLabel, speedup
from specdecode.records import RecordedChoice, RecordedTokens, RequestRecord, TimedRounds
from specdecode.types import DrafterKind, Method, StepResult

logger = logging.getLogger(__name__)

_MAX_WAITING = 4096
"""Records that wait for the disk; beyond it they are dropped."""


class RoundTimes:
    """Where the time of a request's rounds went."""

    def __init__(self) -> None:
        self.drafted = TimedRounds()
        self.plain = TimedRounds()

    def took(self, result: StepResult, round_: Round, num_kept: int, seconds: float | None) -> None:
        """A result of which so many tokens were kept; `seconds` since the one before, None for the first."""
        if seconds is None or not num_kept:
            return
        num_rounds = 1 if result.num_drafted else num_kept
        times = result.times
        parts = (num_rounds * part for part in (times.queue, times.forward, times.verify, times.step))
        timed = TimedRounds(num_rounds, num_kept, seconds, round_.draft_seconds, *parts)
        if round_.drafter is None:
            self.plain += timed
        else:
            self.drafted += timed


class Recorder:
    """One router's records.

    Args:
        settings: name the file.

    Raises:
        InvalidArgumentError: the file can't be written.
    """

    def __init__(self, settings: RouterSettings) -> None:
        assert settings.record_path is not None
        path = Path(settings.record_path)
        self._settings = settings
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # One file is written, the others are older.
            size, kept = settings.record_bytes, settings.record_files - 1
            self._file = _File(path, maxBytes=size, backupCount=kept, encoding="utf-8")
        except OSError as error:
            raise InvalidArgumentError.of("record_path", f"{path} can't be written: {error}") from None
        waiting: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING)
        self._handler = _Handler(waiting)
        self._listener = QueueListener(waiting, self._file)
        self._listener.start()

    def write(self, record: RequestRecord) -> None:
        """Soon; a record is dropped rather than waited for."""
        line = logging.LogRecord("records", logging.INFO, "", 0, record.to_line(), None, None)
        self._handler.handle(line)

    def close(self) -> None:
        """Writes what waits."""
        self._listener.stop()
        self._file.close()
        if self._handler.num_dropped:
            logger.warning("%d records of requests were dropped", self._handler.num_dropped)

    def record(
        self,
        request: Request,
        times: RoundTimes,
        model: str,
        draft_model: str,
        began: float,
        first: float | None,
    ) -> RequestRecord:
        """Of a request that has ended.

        Args:
            times: of its rounds.
            began: when it came, by the monotonic clock.
            first: when its first piece went out, by the same.
        """
        now = time.monotonic()
        resolved, usage = request.resolved, total_usage(request)
        tallies = [each for choice in request.choices for each in choice.figures.tallies]
        told = _label(resolved.method, None)
        everything = merged(tally for _, tally in tallies).figures(told)
        drafted = merged(tally for label, tally in tallies if label.drafter is not None)
        plain = merged(tally for label, tally in tallies if label.drafter is None)
        fast = speedup(drafted.figures(told), plain.figures(told) if _has_rounds(plain) else None)
        failures = [c.error for c in request.choices if c.error and not isinstance(c.error, CancelledError)]
        return RequestRecord(
            id=request.id,
            trace_id="" if request.trace is None else f"{request.trace.context.trace_id:032x}",
            ended_at=time.time(),
            model=model,
            draft_model=draft_model,
            method=resolved.method.value,
            temperature=resolved.sampling.temperature,
            traffic_class=resolved.traffic_class,
            mode=resolved.mode.value,
            tier=resolved.tier.value,
            outcome=outcome(request),
            error=failures[0].reason.value if failures else None,
            drafters=tuple(sorted({label.drafter.value for label, _ in tallies if label.drafter})),
            num_choices=resolved.n,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_emitted=usage.num_emitted,
            num_rounds=usage.num_rounds,
            num_drafted=usage.num_drafted,
            num_accepted=usage.num_accepted,
            num_bonus=usage.num_bonus,
            num_recovered=usage.num_recovered,
            num_failovers=usage.num_failovers,
            num_preemptions=usage.num_preemptions,
            num_fallbacks=everything.num_fallbacks,
            fallback_triggered=everything.num_fallbacks > 0,
            acceptance=everything.acceptance,
            alphas=everything.alphas,
            tested=everything.tested,
            passed=everything.passed,
            runs=everything.runs,
            reasons=dict(everything.reasons),
            speedup_observed=None if fast is None else fast.observed,
            speedup_theoretical=None if fast is None else fast.theoretical,
            seconds=now - began,
            first_token_seconds=None if first is None else first - began,
            drafted=times.drafted,
            plain=times.plain,
            tokens=_tokens(request) if self._settings.record_tokens else None,
        )


def _tokens(request: Request) -> RecordedTokens:
    resolved = request.resolved
    num_prompt = len(resolved.prompt_token_ids)
    choices = (
        RecordedChoice(
            tuple(choice.tokens[num_prompt:]),
            None if choice.finish_reason is None else choice.finish_reason.value,
        )
        for choice in request.choices
    )
    return RecordedTokens(resolved.prompt_token_ids, resolved.sampling, resolved.seed, tuple(choices))


def _label(method: Method, drafter: DrafterKind | None) -> FigureLabel:
    return FigureLabel("", "", drafter, method)


def _has_rounds(tally: Tally) -> bool:
    return tally.num_emitted > 0


class _Handler(QueueHandler):
    """Drops what finds the queue full."""

    num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1


class _File(RotatingFileHandler):
    """Says once that the disk refuses, and goes on trying."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            logger.error("records of requests can't be written: %s", sys.exc_info()[1])
