"""The loops of all target replicas, which come and go while the router runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from router.discovery import Sightings, follow
from router.rounds import ReplicaLoop, Retired
from specdecode.config import DNS_SCHEME, WATCH_SCHEME
from specdecode.errors import SpecdecodeError
from specdecode.replicas import ReplicaRole, ReplicaState
from specdecode.tls import ClientTls

logger = logging.getLogger(__name__)

_OTHERS_SECONDS = 1.0
"""How long replicas that were named one by one are waited for, once the first has answered."""


class Crew:
    """Tasks that live as long as the router.

    Attributes:
        failed: done with what ended a task, if anything but the router's own end did.
    """

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it; it may end by itself, or be cancelled, but not fail."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self) -> None:
        """Ends all."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)


@dataclass(frozen=True)
class _Member:
    loop: ReplicaLoop
    link: asyncio.Task[None]
    is_named: bool
    """Whether the operator named this very replica."""


class Targets:
    """Keeps one loop for each replica that its sources tell of. Build it inside the running event loop.

    Args:
        sources: as `router.discovery.follow` reads them.
        max_message_bytes: of a registry's messages.
        build: makes the loop of the replica at an address, with its link.
        crew: runs loops and links.
        tls: how a registry is called.
    """

    def __init__(
        self,
        sources: Sequence[str],
        max_message_bytes: int,
        build: Callable[[str], ReplicaLoop],
        crew: Crew,
        tls: ClientTls | None = None,
    ) -> None:
        self._tls = tls
        self._sources = sources
        self._max_message_bytes = max_message_bytes
        self._build = build
        self._crew = crew
        self._members: dict[str, _Member] = {}
        self._contact: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def loops(self) -> list[ReplicaLoop]:
        """Of the replicas that are there."""
        return [member.loop for member in self._members.values()]

    def start(self) -> None:
        """Begins to follow the sources."""
        for source in self._sources:
            self._crew.add(self._follow(source))

    async def met(self) -> None:
        """Waits for the first replica that answers; for others that were named, a moment longer.

        Raises:
            FailedPreconditionError: one that was named must not be used, or the first that answers.
        """
        await self._contact
        named = [m.loop.link.first_contact for m in self._members.values() if m.is_named]
        if named:
            done, _ = await asyncio.wait(named, timeout=_OTHERS_SECONDS if len(named) > 1 else None)
            for contact in done:
                contact.result()

    async def _follow(self, source: str) -> None:
        is_named = not source.startswith((WATCH_SCHEME, DNS_SCHEME))
        own: set[str] = set()
        async for sightings in follow(source, ReplicaRole.TARGET, self._max_message_bytes, self._tls):
            self._apply(sightings, own, is_named)

    def _apply(self, sightings: Sightings, own: set[str], is_named: bool) -> None:
        """Brings the loops of one source, whose addresses are `own`, to what it tells."""
        for address in own - sightings.keys():
            own.discard(address)
            self._remove(address, at_once=False)
        for address, state in sightings.items():
            if state is ReplicaState.DEAD:
                if address in own:
                    own.discard(address)
                    self._remove(address, at_once=True)
            elif address in own:
                self._members[address].loop.link.draining |= state is ReplicaState.DRAINING
            elif address not in self._members and state is not ReplicaState.DRAINING:
                own.add(address)
                self._add(address, is_named)

    def _add(self, address: str, is_named: bool) -> None:
        loop = self._build(address)
        loop.link.first_contact.add_done_callback(self._note_contact)
        link = self._crew.add(loop.link.run())
        self._members[address] = _Member(loop, link, is_named)
        self._crew.add(_run(loop, link))

    def _remove(self, address: str, at_once: bool) -> None:
        """What runs there goes on there, unless it is dead: then elsewhere."""
        member = self._members.pop(address)
        logger.info("target %s is %s", address, "dead" if at_once else "not listed any more")
        if at_once:
            member.link.cancel()
        member.loop.put(Retired())

    def _note_contact(self, contact: asyncio.Future[None]) -> None:
        if self._contact.done() or contact.cancelled():
            return
        error = contact.exception()
        if error is None:
            self._contact.set_result(None)
        elif isinstance(error, SpecdecodeError):
            self._contact.set_exception(error)


async def _run(loop: ReplicaLoop, link: asyncio.Task[None]) -> None:
    """A loop until it is retired and empty; its link ends with it."""
    try:
        await loop.run()
    finally:
        link.cancel()
