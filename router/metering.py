"""What each key has used lately, against its limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router.access import Caller
from specdecode.errors import Reason, ResourceExhaustedError

_MINUTE = 60.0
_RETRY_AT_ONCE_SECONDS = 1.0


@dataclass
class _Bucket:
    """An allowance that grows by `per_minute`, up to a minute's worth; it may be overdrawn."""

    per_minute: int
    level: float
    updated: float

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there; 0 if it is."""
        rate = self.per_minute / _MINUTE
        self.level = min(self.level + (now - self.updated) * rate, float(self.per_minute))
        self.updated = now
        return max((min(amount, self.per_minute) - self.level) / rate, 0.0)


@dataclass
class _Use:
    """One key's."""

    requests: _Bucket | None = None
    tokens: _Bucket | None = None
    at_once: int = 0


class Meter:
    """Requests and tokens of keys that have limits.

    A request may begin while the key has tokens left, whatever it will take; what is overdrawn delays the
    next ones. So nothing is refused for a text that may turn out short, and the mean is kept.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def check(self, caller: Caller) -> None:
        """Refuses a request that a key may not begin now; nothing is counted yet.

        Raises:
            ResourceExhaustedError: with the seconds after which it may.
        """
        limits, use, now = caller.limits, self._use(caller), self._clock()
        if limits.requests_at_once is not None and use.at_once >= limits.requests_at_once:
            raise _refusal(f"{use.at_once} requests of this key run, as many as may", _RETRY_AT_ONCE_SECONDS)
        if use.requests is not None and (wait := use.requests.wait(1.0, now)):
            raise _refusal(f"this key may begin {limits.requests_per_minute} requests a minute", wait)
        if use.tokens is not None and (wait := use.tokens.wait(1.0, now)):
            raise _refusal(f"this key may use {limits.tokens_per_minute} tokens a minute", wait)

    @contextmanager
    def counted(self, caller: Caller) -> Iterator[None]:
        """Counts a request from beginning to end.

        Raises:
            ResourceExhaustedError: the key may not begin one.
        """
        self.check(caller)
        use = self._use(caller)
        if use.requests is not None:
            use.requests.level -= 1
        use.at_once += 1
        try:
            yield
        finally:
            use.at_once -= 1

    def used(self, caller: Caller, num_tokens: int) -> None:
        """Counts tokens."""
        use = self._uses.get(caller.key)
        if use is not None and use.tokens is not None:
            use.tokens.level -= num_tokens

    def _use(self, caller: Caller) -> _Use:
        """The key's use; a limit that was changed begins anew."""
        use = self._uses.setdefault(caller.key, _Use())
        limits = caller.limits
        use.requests = self._bucket(use.requests, limits.requests_per_minute)
        use.tokens = self._bucket(use.tokens, limits.tokens_per_minute)
        return use

    def _bucket(self, bucket: _Bucket | None, per_minute: int | None) -> _Bucket | None:
        if per_minute is None:
            return None
        if bucket is not None and bucket.per_minute == per_minute:
            return bucket
        return _Bucket(per_minute, float(per_minute), self._clock())


def _refusal(message: str, wait: float) -> ResourceExhaustedError:
    return ResourceExhaustedError(message, reason=Reason.RATE_LIMITED, retry_after=wait)
