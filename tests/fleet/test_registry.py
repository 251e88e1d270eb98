"""A registry tells whoever watches what replicas say of themselves, and of those that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.discovery import follow
from specdecode.announcing import Announcer
from specdecode.config import TargetSettings
from specdecode.replicas import ReplicaRole, ReplicaState, Scale
from specdecode.serving import Server
from specdecode.types import LoadSnapshot, ModelInfo
from specdecode.v1 import replica_service_pb2_grpc as pb_grpc
from target_service.registry import SERVICE_NAME, Registry, ReplicaServicer
from tests.services import eventually

MIB = 2**20
INFO = ModelInfo("tiny", "f", 10, 100, "float32", "cpu")


@dataclass
class Running:
    """A registry and what is said to it."""

    server: Server
    registry: Registry
    announcers: list[Announcer] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def announcer(self, name: str, role: ReplicaRole = ReplicaRole.TARGET) -> tuple[Announcer, Server]:
        """Of a replica that has begun to start."""
        server = Server([], MIB)
        settings = TargetSettings(registry=self.address, replica_id=name)
        self.announcers.append(Announcer(settings, role, server))
        self.announcers[-1].start()
        return self.announcers[-1], server

    async def is_told(self, name: str, state: ReplicaState) -> None:
        """Waits until a replica is in a state."""

        def holds() -> bool:
            known = self.registry.replicas.get(name)
            return known is not None and known.state is state

        await eventually(holds, f"{name} is {state.value}")


@asynccontextmanager
async def registry(port: int = 0) -> AsyncIterator[Running]:
    server, known = Server([SERVICE_NAME], MIB), Registry()

    async def scale(wanted: Scale) -> Scale:
        return wanted

    pb_grpc.add_ReplicaServiceServicer_to_server(ReplicaServicer(known, server.draining, scale), server.grpc)
    await server.start("127.0.0.1", port)
    running = Running(server, known)
    try:
        yield running
    finally:
        for announcer in running.announcers:
            await announcer.stop()
        await server.drain(None)


async def test_a_replica_is_told_of_from_its_start_to_its_end() -> None:
    async with registry() as running:
        announcer, server = running.announcer("target-1")
        await running.is_told("target-1", ReplicaState.STARTING)
        announcer.calibrating(INFO)
        await running.is_told("target-1", ReplicaState.CALIBRATING)
        announcer.load = lambda: LoadSnapshot(num_running=3)
        announcer.ready(1234)
        await running.is_told("target-1", ReplicaState.READY)
        known = running.registry.replicas["target-1"]
        assert (known.address, known.model, known.load) == (
            "127.0.0.1:1234",
            INFO,
            LoadSnapshot(num_running=3),
        )
        await server.drain(None)
        await running.is_told("target-1", ReplicaState.DRAINING)
        await announcer.stop()
        await running.is_told("target-1", ReplicaState.DEAD)


async def test_a_load_that_changes_is_told_without_being_asked_for() -> None:
    async with registry() as running:
        announcer, _ = running.announcer("target-1")
        load = LoadSnapshot()
        announcer.load = lambda: load
        announcer.ready(1)
        await running.is_told("target-1", ReplicaState.READY)
        load = LoadSnapshot(num_waiting=7)
        await eventually(lambda: running.registry.replicas["target-1"].load == load, "the load is told")


async def test_a_router_sees_replicas_of_its_role_and_who_is_dead() -> None:
    async with registry() as running:
        seen: list[dict[str, ReplicaState]] = []

        async def watch() -> None:
            async for sightings in follow(f"watch://{running.address}", ReplicaRole.TARGET, MIB):
                seen.append(dict(sightings))

        watching = asyncio.create_task(watch())
        target, _ = running.announcer("target-1")
        draft, _ = running.announcer("draft-1", ReplicaRole.DRAFT)
        draft.ready(2)
        target.ready(1)
        await running.is_told("draft-1", ReplicaState.READY)
        await eventually(lambda: {"127.0.0.1:1": ReplicaState.READY} in seen, "the target is seen")
        await target.stop()
        await eventually(lambda: {"127.0.0.1:1": ReplicaState.DEAD} in seen, "its end is seen")
        assert all("127.0.0.1:2" not in sightings for sightings in seen)
        watching.cancel()


async def test_a_registry_that_was_away_hears_everything_anew() -> None:
    async with registry() as first:
        port = first.server.port
        announcer, _ = first.announcer("target-1")
        announcer.ready(1)
        await first.is_told("target-1", ReplicaState.READY)
        await first.server.drain(None)
        async with registry(port) as second:
            await second.is_told("target-1", ReplicaState.READY)


async def test_an_announcer_stops_whatever_its_registry_does_at_that_moment() -> None:
    for _ in range(12):
        async with registry() as first:
            port = first.server.port
            announcer, _ = first.announcer("target-1")
            await first.is_told("target-1", ReplicaState.STARTING)
            await first.server.drain(None)
            async with registry(port) as second:
                await second.is_told("target-1", ReplicaState.STARTING)
            async with asyncio.timeout(20):
                await announcer.stop()
        await eventually(lambda: not _asked_for_requests(), "gRPC asks an ended call for no more requests")


def _asked_for_requests() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task)]


async def test_only_the_newest_stream_of_a_replica_counts() -> None:
    async with registry() as running:
        old, _ = running.announcer("target-1")
        old.ready(1)
        await running.is_told("target-1", ReplicaState.READY)
        new, _ = running.announcer("target-1")
        await running.is_told("target-1", ReplicaState.STARTING)
        await old.stop()
        new.ready(2)
        await running.is_told("target-1", ReplicaState.READY)
        assert running.registry.replicas["target-1"].address == "127.0.0.1:2"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
async def test_a_name_is_resolved_to_all_its_addresses(name: str) -> None:
    sightings = follow(f"dns:///{name}:1234", ReplicaRole.TARGET, MIB)
    with suppress(StopAsyncIteration):
        assert "127.0.0.1:1234" in await anext(aiter(sightings))
