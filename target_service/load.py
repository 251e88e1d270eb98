"""What a load snapshot says beside counts: price, idle share, what a round emits, and how far the costs fit.

Everything is told by the engine at the start and the end of its steps; nothing here looks at a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specdecode.cost_tables import StepCosts
from specdecode.types import LoadSnapshot, StepResult
from target_service.scheduler import Scheduler
from target_service.sequence import TargetSequence, Work

_WINDOW_SECONDS = 4.0
_RATIO_SMOOTHING = 0.05
_EMITTED_SMOOTHING = 0.05
_FARTHEST_RATIO = 8.0
"""No step counts as more than so many times what was expected: one that was held up is not 200."""
_STALE_STEPS = 200
_STALE_SHARE = 0.2


class IdleShare:
    """φ: of the time in which some router was waited for, the share in which no step ran; over the last few
    seconds.
    """

    def __init__(self, window_seconds: float = _WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._since: float | None = None
        self._stepping = self._waiting = False
        self._idle = self._waited = 0.0

    @property
    def share(self) -> float:
        """In [0, 1]; 1 while nothing is known."""
        return self._idle / self._waited if self._waited > 0 else 1.0

    def change(self, now: float, *, stepping: bool, waiting: bool) -> None:
        """Notes how it is from `now` on: whether a step runs, and whether a router is waited for."""
        # A clock that is set back adds nothing.
        seconds = max(now - self._since, 0.0) if self._since is not None else 0.0
        if self._waiting:
            kept = math.exp(-seconds / self._window_seconds)
            self._waited = self._waited * kept + seconds
            self._idle = self._idle * kept + (0.0 if self._stepping else seconds)
        self._since, self._stepping, self._waiting = now, stepping, waiting


@dataclass(frozen=True)
class _Step:
    tokens: int
    rows: int
    cached_tokens: int
    sequences: int
    seconds: float

    def expected(self, costs: StepCosts) -> float:
        return costs.step(self.tokens, self.rows, self.cached_tokens, self.sequences)


class CostMatch:
    """How well the measured costs fit what steps take.

    Attributes:
        costs: None until they are measured.
        ratio: what steps take of what the costs say, smoothed; 1 while nothing is known.
    """

    def __init__(self) -> None:
        self.costs: StepCosts | None = None
        self.ratio = 1.0
        self._steps: deque[_Step] = deque(maxlen=_STALE_STEPS)
        self._usual = 1.0

    @property
    def is_stale(self) -> bool:
        """Whether the last 200 steps took, in all, more than 20 % more or less than they should have."""
        if len(self._steps) < _STALE_STEPS:
            return False
        return abs(self._overall() / self._usual - 1) > _STALE_SHARE

    def note(self, load: LoadSnapshot, sequences: int) -> None:
        """Compares a step of so many sequences with its costs."""
        # A step without rows need not have waited for its device.
        if self.costs is None or not load.num_rows:
            return
        counts = (load.tokens_in_flight, load.num_rows, load.num_cached_tokens)
        expected = self.costs.step(*counts, sequences)
        seconds = min(load.step_seconds, _FARTHEST_RATIO * expected)
        self._steps.append(_Step(*counts, sequences, seconds))
        self.ratio += (seconds / expected - self.ratio) * _RATIO_SMOOTHING

    def measured(self, costs: StepCosts) -> None:
        """Takes new costs.

        Where they say the same as the old ones, what makes steps differ is how the machine is used; that the
        costs are measured again would not change it, so it counts as usual from now on.
        """
        known = self.costs is not None and len(self._steps) == _STALE_STEPS
        self.costs = costs
        self._usual = self._overall() if known else 1.0
        self.ratio = self._usual
        self._steps.clear()

    def _overall(self) -> float:
        assert self.costs is not None
        costs = self.costs
        return sum(step.seconds for step in self._steps) / sum(step.expected(costs) for step in self._steps)


class LoadMeter:
    """Fills the snapshot's fields that need more than one step to know.

    Attributes:
        match: costs and how they fit.
        idle: φ.
    """

    def __init__(self) -> None:
        self.match = CostMatch()
        self.idle = IdleShare()
        self._round_emitted = 1.0

    def note_results(self, results: Sequence[StepResult]) -> None:
        """Learns what a round with drafts emits."""
        for result in results:
            if result.num_drafted and result.error is None:
                self._round_emitted += (len(result.token_ids) - self._round_emitted) * _EMITTED_SMOOTHING

    def expected_emitted(self, ordered: Sequence[TargetSequence]) -> float:
        """Emitted tokens of windows that are ordered."""
        return sum(self._round_emitted if sequence.drafts() else 1.0 for sequence in ordered)

    def price(self, load: LoadSnapshot, sequences: int, emitted: int) -> float:
        """λ of one more token in flight at a step like this one; 0 without costs."""
        costs, tokens, rows = self.match.costs, load.tokens_in_flight, load.num_rows
        if costs is None or not tokens:
            return 0.0
        # The ratio would scale both: it cancels.
        seconds = costs.step(tokens, rows, load.num_cached_tokens, sequences)
        more = costs.step(tokens + 1, rows + 1, load.num_cached_tokens, sequences)
        return emitted * (more - seconds) / seconds


def is_awaited(sequence: TargetSequence) -> bool:
    """Whether only its router's next order is missing."""
    return not sequence.ready and sequence.kv.kv_len >= sequence.committed_length - 1


@dataclass(frozen=True)
class NextStep:
    """What is known of the next step when one ends.

    Attributes:
        ordered: running sequences whose windows it carries without another order.
        num_ordered_tokens: of those windows.
        num_prefill_tokens: that it computes besides.
    """

    ordered: tuple[TargetSequence, ...]
    num_ordered_tokens: int
    num_prefill_tokens: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> NextStep:
        """By what is running; who waits for admission is not counted."""
        limits = scheduler.limits
        ordered, windows, prefill = [], 0, 0
        for sequence in scheduler.running:
            lacking = max(sequence.committed_length - sequence.kv.kv_len - 1, 0)
            prefill += min(lacking, limits.prefill_chunk)
            if sequence.ready and lacking <= limits.prefill_chunk:
                ordered.append(sequence)
                windows += 1 + len(sequence.drafts())
        windows = min(windows, limits.max_tokens_in_flight)
        return cls(tuple(ordered), windows, min(prefill, limits.max_tokens_in_flight - windows))


def cached_tokens(works: Sequence[Work]) -> int:
    """KV tokens that a step's sequences hold."""
    return sum(work.sequence.kv.kv_len for work in works)
