"""Which draft service the router asks: the one that was named, or one of those that a registry tells of."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from router.discovery import Sightings, follow
from router.drafts import DraftDesk
from router.replicas import DraftLink
from router.targets import Crew
from specdecode.config import WATCH_SCHEME
from specdecode.replicas import ReplicaRole, ReplicaState
from specdecode.tls import ClientTls


class DraftSource:
    """Gives the desk a link, and another one when the replica at its end is gone. Build it in the event loop.

    Args:
        source: host:port, or `watch://host:port`.
        max_message_bytes: of a registry's messages.
        build: makes the link to the replica at an address.
        tls: how a registry is called.

    Attributes:
        met: done when a draft service has answered for the first time; raises if it must not be used.
    """

    def __init__(
        self,
        source: str,
        max_message_bytes: int,
        build: Callable[[str], DraftLink],
        desk: DraftDesk,
        crew: Crew,
        tls: ClientTls | None = None,
    ) -> None:
        self._tls = tls
        self.source = source
        self.met: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._max_message_bytes = max_message_bytes
        self._build = build
        self._desk = desk
        self._crew = crew
        self._link: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Follows the source; ends at once where there is only one draft service."""
        if not self.source.startswith(WATCH_SCHEME):
            await self._use(self.source)
            return
        async for sightings in follow(self.source, ReplicaRole.DRAFT, self._max_message_bytes, self._tls):
            await self._apply(sightings)

    async def _apply(self, sightings: Sightings) -> None:
        """Stays where it is while that replica is ready; among others, each router draws its own."""
        ready = [address for address, state in sightings.items() if state is ReplicaState.READY]
        current = None if self._desk.link is None else self._desk.link.address
        if ready and current not in ready:
            await self._use(random.choice(ready))

    async def _use(self, address: str) -> None:
        if self._link is not None:
            self._link.cancel()
            await asyncio.wait([self._link])
        self._desk.link = link = self._build(address)
        link.first_contact.add_done_callback(self._note_contact)
        self._link = self._crew.add(link.run())

    def _note_contact(self, contact: asyncio.Future[None]) -> None:
        if self.met.done() or contact.cancelled():
            return
        error = contact.exception()
        if error is None:
            self.met.set_result(None)
        else:
            self.met.set_exception(error)
            self.met.exception()  # it is logged where it happens
