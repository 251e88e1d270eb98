"""How many target replicas there should be, from what they tell of their load: pure, one call a look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdecode.types import LoadSnapshot


@dataclass(frozen=True)
class ScalingRule:
    """When replicas are added and taken away.

    Attributes:
        least, most: replicas.
        high_price: λ, the mean over the replicas, from which on another one is wanted; so it is when
            somebody queues on each of them.
        up_seconds, down_seconds: how long that must last without a break.
        pause_seconds: after a change nothing is changed: a replica takes its time to start.
    """

    least: int
    most: int
    high_price: float = 0.5
    up_seconds: float = 15.0
    down_seconds: float = 300.0
    pause_seconds: float = 60.0


class Autoscaler:
    """Looks at the load again and again; remembers since when it has been high or low."""

    def __init__(self, rule: ScalingRule) -> None:
        self._rule = rule
        self._high_since: float | None = None
        self._idle_since: float | None = None
        self._changed_at = -float("inf")

    def wanted(self, now: float, size: int, loads: Sequence[LoadSnapshot]) -> int:
        """Replicas from now on.

        Args:
            now: seconds on any clock that does not go back.
            size: replicas that are wanted already.
            loads: of those that are ready.
        """
        rule = self._rule
        self._high_since = _since(self._high_since, _is_high(rule, loads), now)
        self._idle_since = _since(self._idle_since, _is_idle(size, loads), now)
        if size != min(max(size, rule.least), rule.most):
            return self._change(now, min(max(size, rule.least), rule.most))
        # What is starting is not ready yet, and would not be told of as busy.
        if now - self._changed_at < rule.pause_seconds or len(loads) != size:
            return size
        if _lasts(self._high_since, now, rule.up_seconds) and size < rule.most:
            return self._change(now, size + 1)
        if _lasts(self._idle_since, now, rule.down_seconds) and size > rule.least:
            return self._change(now, size - 1)
        return size

    def _change(self, now: float, size: int) -> int:
        self._changed_at, self._high_since, self._idle_since = now, None, None
        return size


def _is_high(rule: ScalingRule, loads: Sequence[LoadSnapshot]) -> bool:
    """Whether somebody queues on every replica, or a further token in flight is dear on the average."""
    if not loads:
        return False
    queues = all(load.num_waiting for load in loads)
    return queues or sum(load.price for load in loads) / len(loads) >= rule.high_price


def _is_idle(size: int, loads: Sequence[LoadSnapshot]) -> bool:
    """Whether one replica less would do: one runs nothing, and nobody queues."""
    busy = sum(load.num_running > 0 for load in loads)
    return not any(load.num_waiting for load in loads) and busy < size


def _since(since: float | None, holds: bool, now: float) -> float | None:
    return None if not holds else now if since is None else since


def _lasts(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since >= seconds
