"""Services as child processes: started together, watched, logged line by line, ended in order."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdecode.client import MAX_MESSAGE_BYTES
from specdecode.errors import FailedPreconditionError
from specdecode.serving import connect, first_of

_PORTS = range(20_000, 32_768)
_POLL_SECONDS = 0.05
_CHUNK_BYTES = 1 << 16
_OVERTIME_SECONDS = 10.0
"""How long after its own grace a service may take to end before it is killed."""

Log = Callable[[str, str], None]
"""Takes a service's name and one line of its output."""


@dataclass(frozen=True)
class Service:
    """How to start one service.

    Attributes:
        name: router, draft or target.
        module: what `python -m` runs.
        argv: its options.
        address: host:port at which it will answer.
        health: host:port at which its health is told in plaintext.
        drain_seconds: its own grace after SIGTERM.
        optional: whether the others go on without it.
        url: where it answers HTTP; "" if it does not.
    """

    name: str
    module: str
    argv: tuple[str, ...]
    address: str
    health: str
    drain_seconds: float
    optional: bool = False
    url: str = ""


class Child:
    """A running service.

    Attributes:
        killed: whether it was ended by force, by us.
    """

    def __init__(self, service: Service, process: Process, log: Log) -> None:
        self.service = service
        self.process = process
        self.killed = False
        self._pump = asyncio.create_task(self._pass_on_output(log))

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def how_it_ended(self) -> str:
        """In words."""
        code = self.process.returncode
        if code is None:
            return "still runs"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    async def wait(self) -> None:
        """Until it has ended and all its output is passed on; raises what passing it on raised."""
        await asyncio.shield(self._pump)
        await self.process.wait()

    async def reap(self) -> None:
        """As `wait` after `kill`, whatever became of its output."""
        await self.process.wait()
        await asyncio.gather(self._pump, return_exceptions=True)

    async def drain(self) -> None:
        """Let running requests finish; by force if it does not end by itself."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.service.drain_seconds + _OVERTIME_SECONDS):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """End it now."""
        self.killed = self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> bool:
        if self.ended:
            return False
        try:
            self.process.send_signal(number)
        except ProcessLookupError:
            return False
        return True

    async def _pass_on_output(self, log: Log) -> None:
        assert self.process.stdout is not None
        async for line in _lines(self.process.stdout):
            log(self.service.name, line)


class Stack:
    """Services that live and end together; leaving the context kills what still runs.

    Attributes:
        children: in the order of starting, which is the reverse order of ending.
    """

    def __init__(self, services: Sequence[Service], log: Log) -> None:
        self._services = services
        self._log = log
        self.children: list[Child] = []

    async def __aenter__(self) -> Self:
        try:
            for service in self._services:
                self.children.append(await _start(service, self._log))
        except BaseException:
            await self._end_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end_all()

    async def serving(self, children: Sequence[Child], report: Callable[[Service, float], None]) -> None:
        """Until all of `children` are SERVING, asked one after another.

        Args:
            report: told of each as it is found serving, with the seconds since the wait began.
        """
        began = time.monotonic()
        for child in children:
            await _serving(child.service.health)
            report(child.service, time.monotonic() - began)

    @property
    def ended(self) -> list[Child]:
        """Services that run no more."""
        return [child for child in self.children if child.ended]

    async def start_again(self, dead: Sequence[Child]) -> list[Child]:
        """Starts these anew; they have ended."""
        started = []
        for child in dead:
            await child.reap()
            started.append(await _start(child.service, self._log))
            self.children[self.children.index(child)] = started[-1]
        return started

    async def died(self, besides: Sequence[Child] = ()) -> None:
        """Until a service has ended, those left out that are known to have."""
        await first_of(*(child.wait() for child in self.children if child not in besides))

    async def drain(self) -> None:
        """Ends the services one after another, the last started first."""
        for child in reversed(self.children):
            await child.drain()

    def kill(self) -> None:
        """Ends all services now."""
        for child in self.children:
            child.kill()

    async def _end_all(self) -> None:
        self.kill()
        for child in self.children:
            await child.reap()


async def _start(service: Service, log: Log) -> Child:
    # -P: a folder called `router` in the working directory must not be taken for ours.
    command = (sys.executable, "-P", "-m", "specdecode.cli.child", str(os.getpid()), service.module)
    # A group of its own: Ctrl-C in a terminal reaches whole groups, and would end all services at once.
    # Bars of libraries that look at the variable only while they are imported.
    environment = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}
    process = await asyncio.create_subprocess_exec(
        *command,
        *service.argv,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env=environment,
        process_group=0,
    )
    return Child(service, process, log)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines without their ends, of any length."""
    rest = b""
    while chunk := await stream.read(_CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


async def _serving(address: str) -> None:
    """Until health at `address` says SERVING."""
    while True:
        # gRPC's own attempts lie up to two seconds apart.
        if await _listening(address) and await _becomes_serving(address):
            return
        await asyncio.sleep(_POLL_SECONDS)


async def _becomes_serving(address: str) -> bool:
    """True once it is SERVING, False when the connection is lost before."""
    async with connect(address, MAX_MESSAGE_BYTES) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            async for response in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return True
        except grpc.aio.AioRpcError:
            pass
    return False


async def _listening(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:
        return False
    writer.close()
    return True


def is_free(host: str, port: int) -> bool:
    """Whether `port` can be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str, taken: Collection[int] = ()) -> int:
    """A port that nobody listens on, and none of those `taken`.

    From below the range that systems hand out by themselves, so that no connection made between now and the
    service's start gets it.
    """
    for port in random.sample(_PORTS, 1000):
        if port not in taken and is_free(host, port):
            return port
    raise FailedPreconditionError(f"no free port on {host} from {_PORTS[0]} to {_PORTS[-1]}")
