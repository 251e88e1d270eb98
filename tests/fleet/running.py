"""`python -m target_service --replicas N` as a process of its own, with all the processes that come of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from specdecode.replicas import Replica, ReplicaRole, ReplicaState, Scale
from specdecode.serving import connect
from specdecode.v1 import replica_service_pb2 as pb
from specdecode.v1 import replica_service_pb2_grpc as pb_grpc
from specdecode.wire import replicas_from_proto, scale_to_proto
from tests.services import eventually

DEADLINE = 180.0
MIB = 2**20
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


class Fleet:
    """A running fleet, watched.

    Attributes:
        replicas: as its registry told last.
        log: what it has written so far.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.replicas: tuple[Replica, ...] = ()
        self.log = ""
        self.address = ""
        self._reader = asyncio.create_task(self._read())
        self._watcher: asyncio.Task[None] | None = None

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.log += line.decode(errors="replace")

    async def is_read(self) -> None:
        """Waits until all that it wrote is read; it has ended."""
        await self._reader

    async def serves(self) -> None:
        """Waits until its registry is there, and watches it from then on."""
        async with asyncio.timeout(DEADLINE):
            while (found := re.search(r"registry of \d+ .* on (\S+)", self.log)) is None:
                assert not self._reader.done(), self.log
                await asyncio.sleep(0.01)
        self.address = found[1]
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        async with connect(self.address, MIB) as channel:
            async for message in pb_grpc.ReplicaServiceStub(channel).WatchReplicas(pb.WatchReplicasRequest()):
                self.replicas = replicas_from_proto(message)

    def ready(self, role: ReplicaRole = ReplicaRole.TARGET) -> list[Replica]:
        """Replicas that serve."""
        return [r for r in self.replicas if r.role is role and r.state is ReplicaState.READY]

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Waits until something about the replicas holds."""
        async with asyncio.timeout(DEADLINE):
            while not holds():
                assert not self._reader.done(), self.log
                await asyncio.sleep(0.01)
        assert holds(), what

    async def scale(self, wanted: Scale) -> None:
        """What `specdecode scale` asks for."""
        async with connect(self.address, MIB) as channel:
            await pb_grpc.ReplicaServiceStub(channel).ScaleReplicas(scale_to_proto(wanted))

    def processes(self) -> set[psutil.Process]:
        """All that came of it and still run, itself included; Ray's are in its session."""
        root = psutil.Process(self.process.pid)
        return {root, *root.children(recursive=True)}

    def pid_of(self, replica: Replica) -> int:
        """Process that listens at a replica's address."""
        port = int(replica.address.rsplit(":", 1)[1])
        for connection in psutil.net_connections("tcp"):
            if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                return int(connection.pid)
        raise AssertionError(f"nobody listens at {replica.address}")

    async def end(self) -> int:
        """By SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE):
            return await self.process.wait()

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        for task in (self._reader, self._watcher):
            if task is not None:
                task.cancel()


@asynccontextmanager
async def fleet(model: Path, *options: str, **variables: str) -> AsyncIterator[Fleet]:
    """A fleet that has been started, on free ports, around a tiny model."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "target_service", "--port=0", f"--model={model}", "--num-blocks=64"),
        *("--num-threads=1", "--dtype=float32", "--calibration=off", "--cores-per-replica=0", *options),
        env={**ENVIRONMENT, **variables},
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    started = Fleet(process)
    try:
        yield started
    finally:
        await started.close()


async def are_gone(processes: set[psutil.Process]) -> None:
    """Waits until none of these runs; zombies do not."""

    def holds() -> bool:
        return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)

    def safely() -> bool:
        try:
            return holds()
        except psutil.NoSuchProcess:
            return False  # gone between two questions: ask again

    await eventually(safely, f"all of {processes} are gone")


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)
