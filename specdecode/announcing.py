"""A replica tells a registry of itself for as long as it lives, and ends in good order when asked to."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc

from specdecode.config import ModelServiceSettings
from specdecode.replicas import Replica, ReplicaRole, ReplicaState
from specdecode.serving import Server, connect, pause
from specdecode.types import LoadSnapshot, ModelInfo
from specdecode.v1 import replica_service_pb2 as pb
from specdecode.v1 import replica_service_pb2_grpc as pb_grpc
from specdecode.wire import replica_to_proto

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 0.5
"""How often a load that changes is told."""
_PAUSE_SECONDS = 0.5
_ANYWHERE = ("0.0.0.0", "::", "")


class Announcer:
    """What one replica says of itself; says nothing where no registry is set. Build it in the event loop.

    Args:
        settings: of the service.
        role: what it serves.
        server: its own; when it drains, the registry learns of it.
        load: asked for the load now, once it is ready.
    """

    def __init__(
        self,
        settings: ModelServiceSettings,
        role: ReplicaRole,
        server: Server,
        load: Callable[[], LoadSnapshot | None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._server = server
        self.load = load
        name = settings.replica_id or f"{role.value}-{socket.gethostname()}-{os.getpid()}"
        self._replica = Replica(name, role, devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to announce."""
        if self._settings.registry is not None:
            self._tasks = [
                asyncio.create_task(self._run(self._settings.registry)),
                asyncio.create_task(self._watch_drain()),
            ]

    async def stop(self) -> None:
        """Leaves the registry."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def calibrating(self, model: ModelInfo) -> None:
        """The model is loaded."""
        self._become(replace(self._replica, state=ReplicaState.CALIBRATING, model=model))

    def ready(self, port: int) -> None:
        """It serves."""
        address = reachable(self._settings, port)
        self._become(replace(self._replica, state=ReplicaState.READY, address=address))

    def _become(self, replica: Replica) -> None:
        self._replica = replica
        self._changed.set()

    async def _watch_drain(self) -> None:
        await self._server.draining.wait()
        self._become(replace(self._replica, state=ReplicaState.DRAINING))

    async def _run(self, address: str) -> None:
        """Announces again and again, until cancelled: a registry that was away hears it all anew."""
        told = ""
        while True:
            ended = asyncio.Event()
            try:
                async with connect(address, self._settings.max_message_bytes, self._settings.mesh) as channel:
                    call = pb_grpc.ReplicaServiceStub(channel).Announce(self._announcements(ended))
                    async for order in call:
                        _obey(order)
                problem = "the registry ended"
            except grpc.aio.AioRpcError as error:
                problem = error.details() or error.code().name
            finally:
                ended.set()
                self._changed.set()
            logger.log(
                logging.DEBUG if problem == told else logging.WARNING,
                "registry %s: %s; announcing again",
                *(address, problem),
            )
            told = problem
            await pause(_PAUSE_SECONDS)

    async def _announcements(self, ended: asyncio.Event) -> AsyncIterator[Any]:
        """What changed, at once; the load, now and then. gRPC goes on to ask when the call has `ended`."""
        told: Replica | None = None
        while not ended.is_set():
            self._changed.clear()
            load = self.load() if self._replica.state is ReplicaState.READY else None
            self._replica = replace(self._replica, load=load)
            if self._replica != told:
                told = self._replica
                yield pb.AnnounceRequest(replica=replica_to_proto(told))
            try:
                async with asyncio.timeout(_LOAD_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue


def reachable(settings: ModelServiceSettings, port: int) -> str:
    """host:port at which others reach what listens here."""
    host = settings.advertised_host or settings.host
    if host in _ANYWHERE:
        host = socket.gethostbyname(socket.gethostname())
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _obey(order: Any) -> None:
    """To drain is what SIGTERM asks for, however the process came to be."""
    if order.drain:
        os.kill(os.getpid(), signal.SIGTERM)
