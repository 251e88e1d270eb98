"""When a client tries again, and when it leaves a busy router alone."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from specdecode.errors import (
    InvalidArgumentError,
    Reason,
    ResourceExhaustedError,
    SpecdecodeError,
    UnavailableError,
)

_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0


@dataclass
class RetryBudget:
    """How many attempts may be repeated: a share of the requests made, so that retries never become the load.

    Attributes:
        share: retries that each request adds to the budget.
        reserve: retries there are at first, and at most.
    """

    share: float = 0.2
    reserve: float = 10.0
    _left: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InvalidArgumentError.of("share", f"{self.share:g} is outside 0 to 1")
        if not self.reserve >= 0:
            raise InvalidArgumentError.of("reserve", f"{self.reserve:g} is below 0")
        self._left = self.reserve

    def request(self) -> None:
        """A request is made."""
        self._left = min(self._left + self.share, self.reserve)

    def take(self) -> bool:
        """Whether a retry may be made; then it counts."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True)
class Retries:
    """What is tried again: requests that were refused for want of room or of a replica.

    Whatever was heard of is not: no text is asked for twice.

    Attributes:
        max_attempts: of one request, the first included.
        budget: shared by all requests of a client.
    """

    max_attempts: int = 4
    budget: RetryBudget = field(default_factory=RetryBudget)

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InvalidArgumentError.of("max_attempts", f"{self.max_attempts} is below 1")

    def pause(self, error: SpecdecodeError, num_attempts: int, seconds_left: float | None) -> float | None:
        """Seconds to wait before the next attempt; None: there is none, and the error stands.

        Args:
            num_attempts: made so far.
            seconds_left: of the request's time; None: it has all there is.
        """
        if num_attempts >= self.max_attempts or not _may_help(error):
            return None
        least = error.retry_after or _PAUSE_SECONDS
        pause = min(least * 2 ** (num_attempts - 1), max(least, _LONGEST_PAUSE_SECONDS))
        pause *= random.uniform(1.0, 1.25)  # those who were refused together shall not come back together
        if seconds_left is not None and pause >= seconds_left:
            return None
        return pause if self.budget.take() else None


class Attempts:
    """The attempts at one request.

    Args:
        retries: None: there is one.
        timeout_seconds: for all of them together; None: no limit.
    """

    def __init__(self, retries: Retries | None, timeout_seconds: float | None) -> None:
        self._retries = retries
        self._end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._count = 0
        self._has_heard = False
        if retries is not None:
            retries.budget.request()

    def begin(self) -> float | None:
        """Seconds that the next attempt has; None: no limit."""
        self._count += 1
        return self._seconds_left

    def heard(self) -> None:
        """Something was answered: there is no other attempt."""
        self._has_heard = True

    def pause_after(self, error: SpecdecodeError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            SpecdecodeError: the error itself, where there is none.
        """
        pause = None
        if self._retries is not None and not self._has_heard:
            pause = self._retries.pause(error, self._count, self._seconds_left)
        if pause is None:
            raise error
        return pause

    @property
    def _seconds_left(self) -> float | None:
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)


def _may_help(error: SpecdecodeError) -> bool:
    if isinstance(error, ResourceExhaustedError):
        return error.reason is Reason.QUEUE_FULL
    return isinstance(error, UnavailableError)
