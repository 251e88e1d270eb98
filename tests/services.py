"""The three services in one event loop, each a real gRPC server on a free port, around tiny models on disk.

    async with Services.started(model) as services:
        answer = await services.generate(pb.GenerateRequest(text="the fox"))

A test may kill a service and start it again on its port, and look into the target's block pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

import draft_service.__main__ as draft_main
import router.__main__ as router_main
import target_service.__main__ as target_main
from draft_service.loop import DraftLoop
from draft_service.service import DraftServicer
from draft_service.tracing import DraftTracer
from router.http.server import HttpServer
from specdecode.config import DraftSettings, RouterSettings, TargetSettings
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.errors import SpecdecodeError
from specdecode.requests import EmittedToken, Piece
from specdecode.serving import Running, Server, connect
from specdecode.telemetry import Tracing, start_tracing
from specdecode.telemetry.meters import Meters, close_telemetry
from specdecode.tls import ClientTls
from specdecode.types import DrafterKind, FinishReason, RoundRecord, Usage
from specdecode.v1 import draft_service_pb2_grpc as draft_grpc
from specdecode.v1 import router_service_pb2 as pb
from specdecode.v1 import router_service_pb2_grpc as router_grpc
from specdecode.v1 import target_service_pb2_grpc as target_grpc
from specdecode.wire import piece_from_proto
from target_service.calibration import Recalibration
from target_service.loop import EngineLoop
from target_service.service import TargetServicer

DEADLINE = 60.0
"""Seconds after which a test gives up waiting."""


async def eventually(holds: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Waits until something that other threads or processes bring about holds.

    Raises:
        AssertionError: it does not within the deadline.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE
    while True:
        found = holds()
        if found if isinstance(found, bool) else await found:
            return
        assert loop.time() < end, f"never: {what}"
        await asyncio.sleep(0.002)


@dataclass
class Answer:
    """What a client has heard of one choice."""

    text: str = ""
    tokens: list[EmittedToken] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    usage: Usage | None = None
    error: SpecdecodeError | None = None

    @property
    def ids(self) -> list[int]:
        """Token ids."""
        return [token.token_id for token in self.tokens]

    @property
    def reasons(self) -> set[str]:
        """Reasons of all rounds."""
        return {record.reason for record in self.rounds}

    def hear(self, piece: Piece) -> None:
        """Takes a piece."""
        self.pieces.append(piece)
        self.text += piece.text
        self.tokens.extend(piece.tokens)
        self.rounds.extend(piece.rounds)
        self.finish_reason, self.stop = piece.finish_reason, piece.stop
        self.usage, self.error = piece.usage, piece.error


@dataclass
class Target:
    """A target replica in this process."""

    server: Server
    loop: EngineLoop
    replica: target_main.Replica
    meters: Meters
    tracing: Tracing | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def num_free_blocks(self) -> int:
        return self.replica.engine.lm.pool.num_free

    @property
    def num_sequences(self) -> int:
        return len(self.replica.engine.sequences)

    @property
    def num_steps(self) -> int:
        return self.replica.engine._step

    @property
    def has_orders(self) -> bool:
        """Whether frames of a router wait for the running step to end."""
        return len(self.loop._inbox) > 0

    async def all_is_free(self) -> None:
        """Waits until no sequence and no block is held."""
        total = self.replica.info.num_blocks
        await eventually(
            lambda: self.num_sequences == 0 and self.num_free_blocks == total, "all blocks are free"
        )
        self.replica.engine.check_integrity()

    async def stop(self) -> None:
        """Ends all streams at once, and the engine; once is enough."""
        if self.server.draining.is_set():
            return
        await self.server.drain(None)
        await asyncio.to_thread(self.loop.stop)
        await asyncio.to_thread(self.replica.stop)
        await asyncio.to_thread(close_telemetry, self.tracing, self.meters)


@dataclass
class Drafts:
    """A draft service in this process."""

    server: Server
    loop: DraftLoop
    offer: draft_main.Offer
    meters: Meters
    tracing: Tracing | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def num_sequences(self) -> int:
        return self.loop._num_sequences

    async def all_is_free(self) -> None:
        """Waits until no sequence and, where there is a model, no block is held."""
        await eventually(lambda: self.num_sequences == 0, "no draft sequence is open")
        drafter: Any = self.offer.drafters.get(DrafterKind.MODEL)
        if drafter is not None:
            pool = drafter.lm.pool
            await eventually(lambda: pool.num_free == pool.num_blocks, "all draft blocks are free")

    async def stop(self) -> None:
        """Ends all streams at once, and the loop; once is enough."""
        if self.server.draining.is_set():
            return
        await self.server.drain(None)
        await asyncio.to_thread(self.loop.stop)
        await asyncio.to_thread(close_telemetry, self.tracing, self.meters)


async def start_target(
    model: Path,
    port: int = 0,
    costs: StepCosts | None = None,
    recalibration_seconds: float | None = None,
    **settings: Any,
) -> Target:
    """A target replica; `settings` are those of TargetSettings.

    Args:
        costs: as if measured; None: not calibrated.
        recalibration_seconds: budget of measuring again while idle; None: never.
    """
    chosen = TargetSettings(
        **({"num_blocks": 64, "dtype": "float32", "num_threads": 1} | settings), model=str(model)
    )
    tracing = start_tracing(chosen)
    replica = await asyncio.to_thread(target_main.build_replica, chosen, tracing)
    if costs is not None:
        replica.engine.meter.match.measured(costs)
    again = recalibration_seconds and Recalibration(replica.engine, recalibration_seconds)
    server = Server([target_main.SERVICE_NAME], chosen.max_message_bytes, chosen.exposure)
    loop = EngineLoop(replica.engine, again or None)
    servicer = TargetServicer(loop, replica.info, server.draining, chosen.max_message_bytes)
    target_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    await server.start("127.0.0.1", port)
    loop.start()
    server.set_serving()
    engine = replica.engine
    meters = Meters(chosen, lambda: engine.counts.families(engine.load, engine.costs))
    return Target(server, loop, replica, meters, tracing)


async def start_drafts(
    model: Path | None, port: int = 0, costs: Mapping[DrafterKind, DraftCosts] | None = None, **settings: Any
) -> Drafts:
    """A draft service; without a model it offers the n-gram drafter alone; `costs` as if measured."""
    fixed = {"num_blocks": 64, "dtype": "float32", "num_threads": 1, "ngram_min": 1}
    chosen = DraftSettings(**(fixed | settings), model=None if model is None else str(model))
    offer = await asyncio.to_thread(draft_main.build_offer, chosen)
    server = Server([draft_main.SERVICE_NAME], chosen.max_message_bytes, chosen.exposure)
    tracing = start_tracing(chosen)
    loop = DraftLoop(offer.drafters, chosen.max_sequences, None if tracing is None else DraftTracer(tracing))
    servicer = DraftServicer(loop, offer.info, server.draining, chosen.max_message_bytes, costs or {})
    draft_grpc.add_DraftServiceServicer_to_server(servicer, server.grpc)
    await server.start("127.0.0.1", port)
    loop.start()
    server.set_serving()
    return Drafts(server, loop, offer, Meters(chosen, loop.families), tracing)


class RouterUnderTest:
    """A router in this process and a client's connection to it."""

    def __init__(self, running: Running, max_message_bytes: int, tls: ClientTls | None = None) -> None:
        self.running = running
        self.channel = connect(f"127.0.0.1:{running.server.port}", max_message_bytes, tls)
        self.stub = router_grpc.RouterServiceStub(self.channel)

    @property
    def url(self) -> str:
        """Of the HTTP front, which `http_port=0` switches on."""
        (http,) = self.running.beside
        assert isinstance(http, HttpServer)
        return f"http://127.0.0.1:{http.port}"

    async def status(self) -> Any:
        """GetStatus."""
        return await self.stub.GetStatus(pb.GetStatusRequest(), timeout=DEADLINE)

    def call(self, request: Any, timeout: float = DEADLINE) -> Any:
        """Starts a Generate call."""
        return self.stub.Generate(request, timeout=timeout)

    async def stop(self) -> None:
        """Closes the client's connection and ends the router."""
        await self.channel.close()
        await self.running.drain(None)
        await self.running.on_stopped()


async def start_router(
    model: Path, targets: list[str], draft: str | None, tls: ClientTls | None = None, **settings: Any
) -> RouterUnderTest:
    """A router that has found its target; `tls` is how the client calls it."""
    fixed = {"estimates_path": None, "port": 0, "http_port": None}
    chosen = RouterSettings(**(fixed | settings), model=str(model), targets=tuple(targets), draft=draft)
    running = await asyncio.wait_for(router_main.start(chosen), DEADLINE)
    return RouterUnderTest(running, chosen.max_message_bytes, tls)


@dataclass
class Services:
    """A router, one or more targets, and a draft service (of ours or a test's own)."""

    model: Path
    router: RouterUnderTest
    targets: list[Target]
    drafts: Drafts | None
    draft_model: Path | None
    target_settings: dict[str, Any]

    @classmethod
    @asynccontextmanager
    async def started(
        cls,
        model: Path,
        draft_model: Path | None = None,
        *,
        num_targets: int = 1,
        draft_address: str | None = None,
        target: dict[str, Any] | None = None,
        draft: dict[str, Any] | None = None,
        **router: Any,
    ) -> AsyncIterator[Services]:
        """All services around `model`; `target`, `draft` and keywords are the services' settings.

        `draft_address` stands for a draft service of the test's own.
        """
        # What was started before a start that fails is ended, too: a server that is left keeps the
        # interpreter from ending.
        async with AsyncExitStack() as stack:
            targets = []
            for _ in range(num_targets):
                targets.append(await start_target(model, **(target or {})))
                stack.push_async_callback(targets[-1].stop)
            drafts = None
            if draft_address is None:
                drafts = await start_drafts(draft_model, **(draft or {}))
                draft_address = drafts.address
                stack.push_async_callback(drafts.stop)
            addresses = [entry.address for entry in targets]
            under_test = await start_router(model, addresses, draft_address, **router)
            services = cls(model, under_test, targets, drafts, draft_model, target or {})
            stack.push_async_callback(services.stop)
            yield services

    async def stop(self) -> None:
        """Ends whatever runs now, the router first."""
        await self.router.stop()
        for entry in [*self.targets, self.drafts]:
            if entry is not None:
                await entry.stop()

    @property
    def target(self) -> Target:
        """The first target."""
        return self.targets[0]

    async def restart_target(self, index: int = 0) -> None:
        """Starts a target that was stopped again, on its port."""
        port = self.targets[index].server.port
        self.targets[index] = await start_target(self.model, port, **self.target_settings)

    async def restart_drafts(self) -> None:
        """Starts the draft service that was stopped again, on its port."""
        assert self.drafts is not None
        self.drafts = await start_drafts(self.draft_model, self.drafts.server.port)

    async def draft_is(self, connected: bool) -> None:
        """Waits until the router has found, or lost, its draft service."""

        async def is_so() -> bool:
            return bool((await self.router.status()).drafts[0].connected is connected)

        await eventually(is_so, f"the draft service is {'there' if connected else 'gone'}")

    async def generate(self, request: Any) -> list[Answer]:
        """All choices of a request, to its end."""
        answers = [Answer() for _ in range(request.n or 1)]
        async for message in self.router.call(request):
            piece = piece_from_proto(message)
            answers[piece.choice].hear(piece)
        return answers

    async def generate_one(self, request: Any) -> Answer:
        """The only choice of a request, to its end."""
        (answer,) = await self.generate(request)
        return answer

    async def all_is_free(self) -> None:
        """Waits until nobody holds anything."""
        for target in self.targets:
            await target.all_is_free()
        if self.drafts is not None:
            await self.drafts.all_is_free()


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """The error that ends a call."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call was not refused")
