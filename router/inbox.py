"""Where a loop finds everything that happened since it last looked."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

E = TypeVar("E")


class Inbox(Generic[E]):
    """Events of one event loop; anybody puts them in at once, one task takes them all."""

    def __init__(self) -> None:
        self._events: list[E] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: E) -> None:
        """Adds an event; never waits."""
        self._events.append(event)
        self._wake()

    async def take(self, until: float | None) -> list[E]:
        """All events there are; waits for the first, at most until the event loop's clock says `until`."""
        if not self._events:
            await self._wait(until)
        events, self._events = self._events, []
        return events

    async def _wait(self, until: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if until is None else loop.call_at(until, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
