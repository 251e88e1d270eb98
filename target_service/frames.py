"""Steps as frames for routers: several may become one, while the router lags or nobody waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from specdecode.requests import LONGEST_PIECE_SECONDS, PIECE_SECONDS
from specdecode.types import StepFrame, StepResult, StepTimes

HELD_ON_CORES_SECONDS = 0.04
"""Frames may be held back this long where steps run on the cores that messages take time of: too short for a
reader to see.
"""
MIN_LEASE_LEFT = 3
"""Whose lease is shorter than this is waited for: the router needs time to renew it."""


def merged(frames: Sequence[StepFrame]) -> StepFrame:
    """One frame that says what at least one frame says: the newest load, results in order.

    Steps of one lease become one result; its times are their means.
    """
    if len(frames) == 1:
        return frames[0]
    costs = next((frame.costs for frame in reversed(frames) if frame.costs is not None), None)
    runs: list[list[StepResult]] = []
    open_runs: dict[int, list[StepResult]] = {}
    for frame in frames:
        for result in frame.results:
            run = open_runs.get(result.sequence)
            if run is None or not _continues(run[-1], result):
                run = open_runs[result.sequence] = []
                runs.append(run)
            run.append(result)
    return StepFrame(frames[-1].step, frames[-1].load, tuple(map(_joined, runs)), costs)


def _continues(before: StepResult, result: StepResult) -> bool:
    """Whether two results can be told as one: tokens of a lease, each a round of its own."""
    plain = not (before.num_drafted or result.num_drafted or before.ended or result.error is not None)
    return plain and bool(before.logprobs) == bool(result.logprobs)


def _joined(run: Sequence[StepResult]) -> StepResult:
    if len(run) == 1:
        return run[0]
    return replace(
        run[-1],
        token_ids=tuple(token for result in run for token in result.token_ids),
        origins=tuple(origin for result in run for origin in result.origins),
        logprobs=tuple(entry for result in run for entry in result.logprobs),
        num_cached_tokens=sum(result.num_cached_tokens for result in run),
        times=_mean(result.times for result in run),
    )


def _mean(times: Iterable[StepTimes]) -> StepTimes:
    columns = zip(*((t.queue, t.forward, t.verify, t.step) for t in times), strict=True)
    return StepTimes(*(sum(column) / len(column) for column in columns))


class HeldFrames:
    """One stream's frames that nobody waits for, until they are worth a message.

    A message costs both processes time whatever it carries, and a step on the same cores waits for it; what
    is said in the middle of a lease changes nothing that the router does.

    Args:
        least_seconds: that a frame may be held back, however few its results.
    """

    def __init__(self, least_seconds: float = 0.0) -> None:
        self._least_seconds = least_seconds
        self._frames: list[StepFrame] = []
        self._present: set[int] = set()
        self._last_sent = 0.0

    def take(self, frame: StepFrame, now: float) -> StepFrame | None:
        """Everything held and this, or None: held as well, until the next step. `now` in seconds."""
        self._frames.append(frame)
        present, self._present = self._present, {result.sequence for result in frame.results}
        can_wait = all(result.sequence in present and _can_wait(result) for result in frame.results)
        # By the end of another step.
        age = now + frame.load.step_seconds - self._last_sent
        # As long as clients' text gathers at the router.
        longest = min(PIECE_SECONDS * len(frame.results), LONGEST_PIECE_SECONDS)
        if can_wait and 0.0 <= age <= max(longest, self._least_seconds):
            return None
        return self.release(now)

    def release(self, now: float) -> StepFrame | None:
        """Everything held; None if nothing is."""
        if not self._frames:
            return None
        frames, self._frames = self._frames, []
        self._last_sent = now
        return merged(frames)


def _can_wait(result: StepResult) -> bool:
    """Whether the router will do nothing on a result but hand its tokens on."""
    return not result.ended and result.lease_left >= MIN_LEASE_LEFT
