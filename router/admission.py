"""Who may begin: requests wait here, in fair turns, while the replicas have as many as they can run.

Turns go by tokens, not by requests: each tenant's counter grows by the tokens that it is served, divided by
its weight, and the next turn is that of the lowest counter (virtual token counters, Sheng et al. 2024). A
tenant that comes back starts at the lowest counter of those who are there, so that nobody saves up turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from router.access import Caller
from specdecode.errors import DeadlineExceededError, Reason, ResourceExhaustedError
from specdecode.requests import Tier

_WINDOW_SECONDS = 30.0
"""Ends of requests are remembered this long, for the time that waiting takes."""
_MAX_ENDS = 512
_RETRY_SECONDS = (0.1, 60.0)
_UNKNOWN_SECONDS = 1.0
"""What is said of the time to wait before any request has ended."""

Tenant = tuple[str, Tier]


@dataclass(eq=False)
class Ticket:
    """One request's place.

    Attributes:
        caller: who asks.
        tier: what its time is worth.
        num_choices: slots that it takes.
        num_prompt_tokens: of its prompt.
        deadline: seconds since the epoch, or None.
    """

    caller: Caller
    tier: Tier
    num_choices: int
    num_prompt_tokens: int
    deadline: float | None = None

    @property
    def tenant(self) -> Tenant:
        """Whose turn it waits for."""
        return self.caller.tenant, self.tier


@dataclass
class _Line:
    """A tenant's waiting requests, and the tokens it was served by its weight."""

    counter: float = 0.0
    weight: float = 1.0
    num_running: int = 0
    waiting: deque[tuple[Ticket, asyncio.Future[None]]] = field(default_factory=deque)


class Admission:
    """The queue before the replicas. Build and use it inside the running event loop.

    Args:
        capacity: choices that may run at once, now.
        max_waiting_tokens: prompt tokens of all that wait.
        batch_weight: what a token of tier batch is worth of an interactive one, now.
        clock: seconds, monotonic; `now` seconds since the epoch.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        max_waiting_tokens: int,
        batch_weight: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._capacity = capacity
        self._max_waiting_tokens = max_waiting_tokens
        self._batch_weight = batch_weight
        self._clock = clock
        self._now = now
        self._lines: dict[Tenant, _Line] = {}
        self._num_running = 0
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._ends: deque[tuple[float, int]] = deque(maxlen=_MAX_ENDS)

    @property
    def num_waiting(self) -> int:
        """Choices that wait for their turn."""
        return self._num_waiting

    @property
    def retry_seconds(self) -> float:
        """When one more would have its turn, as requests end now."""
        return self._wait(self._num_waiting + 1)

    @asynccontextmanager
    async def turn(self, ticket: Ticket) -> AsyncIterator[None]:
        """Waits for a turn and holds it.

        Raises:
            ResourceExhaustedError: too much waits already, or its turn would come after its deadline.
            DeadlineExceededError: the deadline passed while it waited.
        """
        line = self._line(ticket)
        if not line.waiting and not line.num_running:
            line.counter = max(line.counter, self._lowest_counter())
        if self._num_waiting or not self._has_room(ticket):
            await self._wait_in(line, ticket)
        else:
            self._begin(line, ticket)
        try:
            yield
        finally:
            self._end(line, ticket)

    def used(self, ticket: Ticket, num_tokens: int) -> None:
        """Counts tokens that were served."""
        line = self._lines.get(ticket.tenant)
        if line is not None:
            line.counter += num_tokens / line.weight

    def wake(self) -> None:
        """Gives turns to those who wait, as far as there is room: it may have grown."""
        while self._num_waiting:
            line = min((line for line in self._lines.values() if line.waiting), key=lambda line: line.counter)
            ticket, turn = line.waiting[0]
            if not turn.done() and not self._has_room(ticket):
                return
            line.waiting.popleft()
            self._leave_queue(ticket)
            if not turn.done():  # else its client is gone, which its own task has yet to learn
                self._begin(line, ticket)
                turn.set_result(None)

    async def _wait_in(self, line: _Line, ticket: Ticket) -> None:
        self._check_wait(line, ticket)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (ticket, turn)
        line.waiting.append(entry)
        self._num_waiting += ticket.num_choices
        self._num_waiting_tokens += ticket.num_prompt_tokens
        patience = None if ticket.deadline is None else max(ticket.deadline - self._now(), 0.0)
        try:
            async with asyncio.timeout(patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._end(line, ticket)  # its turn came together with what ended the waiting
            elif entry in line.waiting:
                line.waiting.remove(entry)
                self._leave_queue(ticket)
                self._forget(ticket.tenant)
                self.wake()
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError("the deadline passed while the request waited") from None
            raise

    def _check_wait(self, line: _Line, ticket: Ticket) -> None:
        if self._num_waiting_tokens + ticket.num_prompt_tokens > self._max_waiting_tokens:
            message = f"{self._num_waiting_tokens} prompt tokens wait; at most {self._max_waiting_tokens}"
            raise ResourceExhaustedError(message, retry_after=self.retry_seconds)
        own = sum(entry.num_choices for entry, _ in line.waiting) + ticket.num_choices
        num_lines = sum(bool(other.waiting) or other is line for other in self._lines.values())
        wait = self._wait(min(self._num_waiting + ticket.num_choices, own * num_lines))
        if ticket.deadline is not None and self._ends and self._now() + wait > ticket.deadline:
            raise ResourceExhaustedError(
                f"its turn comes in {wait:.1f} s, after its deadline",
                reason=Reason.DEADLINE_TOO_SOON,
                retry_after=wait,
            )

    def _wait(self, num_choices: int) -> float:
        """Seconds until so many have had their turn, as requests have ended lately."""
        now = self._clock()
        while self._ends and self._ends[0][0] < now - _WINDOW_SECONDS:
            self._ends.popleft()
        if not self._ends:
            return _UNKNOWN_SECONDS
        ended = sum(count for _, count in self._ends)
        seconds = num_choices * max(now - self._ends[0][0], 0.001) / ended
        return min(max(seconds, _RETRY_SECONDS[0]), _RETRY_SECONDS[1])

    def _has_room(self, ticket: Ticket) -> bool:
        return not self._num_running or self._num_running + ticket.num_choices <= self._capacity()

    def _line(self, ticket: Ticket) -> _Line:
        line = self._lines.setdefault(ticket.tenant, _Line())
        tier_weight = self._batch_weight() if ticket.tier is Tier.BATCH else 1.0
        line.weight = ticket.caller.weight * tier_weight
        return line

    def _lowest_counter(self) -> float:
        active = (line.counter for line in self._lines.values() if line.waiting or line.num_running)
        return min(active, default=0.0)

    def _leave_queue(self, ticket: Ticket) -> None:
        self._num_waiting -= ticket.num_choices
        self._num_waiting_tokens -= ticket.num_prompt_tokens

    def _begin(self, line: _Line, ticket: Ticket) -> None:
        line.num_running += ticket.num_choices
        line.counter += ticket.num_prompt_tokens / line.weight
        self._num_running += ticket.num_choices

    def _end(self, line: _Line, ticket: Ticket) -> None:
        line.num_running -= ticket.num_choices
        self._num_running -= ticket.num_choices
        self._ends.append((self._clock(), ticket.num_choices))
        self._forget(ticket.tenant)
        self.wake()

    def _forget(self, tenant: Tenant) -> None:
        """Once nobody else is there either, counters start again; a tenant alone needs none."""
        if not any(line.waiting or line.num_running for line in self._lines.values()):
            self._lines.clear()
        elif len(self._lines) > _MAX_ENDS:
            line = self._lines[tenant]
            if not line.waiting and not line.num_running:
                del self._lines[tenant]
