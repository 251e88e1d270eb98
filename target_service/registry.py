"""Which replicas there are: they announce themselves here, routers watch (`specdecode.v1.ReplicaService`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc

from specdecode import wire
from specdecode.replicas import Replica, ReplicaState, Scale
from specdecode.serving import aborting
from specdecode.v1 import replica_service_pb2 as pb
from specdecode.v1 import replica_service_pb2_grpc as pb_grpc

SERVICE_NAME = "specdecode.v1.ReplicaService"
_REMEMBERED_SECONDS = 30.0
"""How long a dead replica that nobody starts again is still told of."""


class Registry:
    """Replicas by id; used within the event loop only.

    Attributes:
        replicas: the newest of each.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()
        self._streams: dict[str, object] = {}
        self._orders: dict[str, asyncio.Event] = {}

    def put(self, replica: Replica) -> None:
        """What is now known of a replica."""
        self.replicas[replica.id] = replica
        self.wake()

    def forget(self, replica_id: str) -> None:
        """It is gone for good."""
        self.replicas.pop(replica_id, None)
        self._orders.pop(replica_id, None)
        self.wake()

    def drain(self, replica_id: str) -> None:
        """Asks a replica to finish what runs and to end; one that announces itself later, too."""
        self.order_of(replica_id).set()

    def order_of(self, replica_id: str) -> asyncio.Event:
        """Set once the replica is to drain."""
        return self._orders.setdefault(replica_id, asyncio.Event())

    def is_leaving(self, replica: Replica) -> bool:
        """Whether it was asked to drain and still runs."""
        return replica.state is not ReplicaState.DEAD and self.order_of(replica.id).is_set()

    def joined(self, replica_id: str) -> object:
        """A stream of this replica begins; its token. One before it counts no more."""
        self._streams[replica_id] = token = object()
        return token

    def is_current(self, replica_id: str, token: object) -> bool:
        """Whether no later stream of this replica has begun."""
        return self._streams.get(replica_id) is token

    def left(self, replica_id: str, token: object) -> None:
        """A replica's stream has ended: it is dead, until it is back."""
        known = self.replicas.get(replica_id)
        if known is None or not self.is_current(replica_id, token):
            return
        self.put(
            replace(known, state=ReplicaState.DEAD, load=None, detail="its stream to the registry ended")
        )
        asyncio.get_running_loop().call_later(_REMEMBERED_SECONDS, self._forget_dead, replica_id)

    def _forget_dead(self, replica_id: str) -> None:
        known = self.replicas.get(replica_id)
        if known is not None and known.state is ReplicaState.DEAD:
            self.forget(replica_id)

    async def changes(self) -> AsyncIterator[tuple[Replica, ...]]:
        """All replicas, now and after each change; a slow reader misses what was in between."""
        while True:
            changed = self._changed
            yield tuple(self.replicas.values())
            await changed.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something about the replicas holds."""
        async for _ in self.changes():
            if holds():
                return

    def wake(self) -> None:
        """Has watchers look again."""
        self._changed.set()
        self._changed = asyncio.Event()


class ReplicaServicer(pb_grpc.ReplicaServiceServicer):  # type: ignore[misc]
    """specdecode.v1.ReplicaService.

    Args:
        registry: of this process.
        draining: set when the service has begun to end; watchers are then left once all replicas that were
            asked to drain have ended.
        scale: starts or ends replicas; answers what is now wanted.
    """

    def __init__(
        self, registry: Registry, draining: asyncio.Event, scale: Callable[[Scale], Awaitable[Scale]]
    ) -> None:
        self._registry = registry
        self._draining = draining
        self._scale = scale

    async def Announce(
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """Takes what a replica says of itself; asks it to drain when it is time."""
        async with aborting(context):
            first = wire.replica_from_proto((await anext(aiter(request_iterator))).replica)
            token = self._registry.joined(first.id)
            reader = asyncio.create_task(self._read(first, token, request_iterator))
            ordered = asyncio.create_task(self._registry.order_of(first.id).wait())
            try:
                await asyncio.wait([reader, ordered], return_when=asyncio.FIRST_COMPLETED)
                if ordered.done():
                    yield pb.AnnounceResponse(drain=True)
                await reader
            finally:
                reader.cancel()
                ordered.cancel()
                self._registry.left(first.id, token)

    async def _read(self, first: Replica, token: object, requests: AsyncIterator[Any]) -> None:
        self._registry.put(first)
        async for request in requests:
            replica = wire.replica_from_proto(request.replica)
            if self._registry.is_current(replica.id, token):
                self._registry.put(replica)

    async def WatchReplicas(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """All replicas, now and after each change."""
        async with aborting(context):
            async for replicas in self._registry.changes():
                yield wire.replicas_to_proto(replicas)
                if self._draining.is_set() and not any(map(self._registry.is_leaving, replicas)):
                    return

    async def ScaleReplicas(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """How many replicas are to run from now on."""
        async with aborting(context):
            wanted = await self._scale(wire.scale_from_proto(request))
            return pb.ScaleReplicasResponse(num_targets=wanted.num_targets, num_drafts=wanted.num_drafts)
