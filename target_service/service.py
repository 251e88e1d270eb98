"""The target service's gRPC handlers: translate and delegate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing

import grpc
from google.protobuf.message import DecodeError

from specdecode import wire
from specdecode.errors import InvalidArgumentError, Reason, SpecdecodeError, UnavailableError
from specdecode.serving import aborting
from specdecode.types import ModelInfo, StepFrame
from specdecode.v1 import target_service_pb2 as pb
from specdecode.v1 import target_service_pb2_grpc as pb_grpc
from target_service.frames import merged
from target_service.loop import EngineLoop

SERVICE_NAME = "specdecode.v1.TargetService"


class TargetServicer(pb_grpc.TargetServiceServicer):  # type: ignore[misc]
    """specdecode.v1.TargetService.

    Args:
        loop: started; the servicer does not stop it.
        info: what GetTargetModel answers.
        draining: set when the service has begun to end.
        max_message_bytes: frames above it are told in several messages.
    """

    def __init__(
        self, loop: EngineLoop, info: ModelInfo, draining: asyncio.Event, max_message_bytes: int
    ) -> None:
        self._loop = loop
        self._info = info
        self._draining = draining
        self._max_message_bytes = max_message_bytes
        self._outboxes: set[Outbox] = set()
        self._events: asyncio.AbstractEventLoop | None = None
        loop.ended.add_done_callback(self._on_engine_ended)

    async def GetTargetModel(
        self,
        request: pb.GetTargetModelRequest,
        context: grpc.aio.ServicerContext[pb.GetTargetModelRequest, pb.GetTargetModelResponse],
    ) -> pb.GetTargetModelResponse:
        """What is served, what its steps cost, and the load right now."""
        load = wire.load_snapshot_to_proto(self._loop.load)
        costs = self._loop.costs
        return pb.GetTargetModelResponse(
            model=wire.model_info_to_proto(self._info),
            load=load,
            costs=None if costs is None else wire.step_costs_to_proto(costs),
        )

    async def Decode(
        self,
        request_iterator: AsyncIterator[pb.DecodeRequest],
        context: grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeResponse],
    ) -> AsyncIterator[pb.DecodeResponse]:
        """Steps for one router, until it ends the stream or is lost; then everything it opened is freed."""
        async with aborting(context), aclosing(self._frames(request_iterator)) as frames:
            async for frame in frames:
                for _, message in wire.messages_within(
                    self._max_message_bytes, frame, wire.step_frame_to_proto
                ):
                    yield message

    async def _frames(self, requests: AsyncIterator[pb.DecodeRequest]) -> AsyncGenerator[StepFrame]:
        outbox = Outbox()
        self._events = asyncio.get_running_loop()
        post = self._events.call_soon_threadsafe

        def deliver(frame: StepFrame | None) -> None:
            post(outbox.put, frame)

        self._outboxes.add(outbox)
        if self._loop.ended.done():
            self._end_all()
        stream = self._loop.open_stream(deliver)
        tasks = [
            asyncio.create_task(self._read(requests, stream, outbox)),
            asyncio.create_task(self._drain()),
        ]
        try:
            while (frame := await outbox.take()) is not None:
                yield frame
        finally:
            for task in tasks:
                task.cancel()
            self._outboxes.discard(outbox)
            self._loop.close_stream(stream)

    async def _read(self, requests: AsyncIterator[pb.DecodeRequest], stream: int, outbox: Outbox) -> None:
        """Hands in the router's frames; a frame that does not hang together ends the stream."""
        try:
            async for request in requests:
                self._loop.submit(stream, wire.decode_frame_from_proto(request))
            outbox.end()
        except DecodeError:
            outbox.end(InvalidArgumentError.of("request", "is no DecodeRequest"))
        except SpecdecodeError as error:
            outbox.end(error)

    def _on_engine_ended(self, ended: Future[None]) -> None:
        """In the engine's thread: routers must not wait for what will never come."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended as well
            if self._events is not None:
                self._events.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        for outbox in self._outboxes:
            outbox.end(UnavailableError("the engine has ended", reason=Reason.REPLICA_LOST))

    async def _drain(self) -> None:
        await self._draining.wait()
        self._loop.drain()


class Outbox:
    """Steps for one router; while it does not read, they merge into one frame. Used within the event loop
    only.
    """

    def __init__(self) -> None:
        self._frames: list[StepFrame] = []
        self._ended = False
        self._error: SpecdecodeError | None = None
        self._changed = asyncio.Event()

    def put(self, frame: StepFrame | None) -> None:
        """Adds a step; None after the last."""
        if frame is None:
            self.end()
            return
        self._frames.append(frame)
        self._changed.set()

    def end(self, error: SpecdecodeError | None = None) -> None:
        """Makes `take` end, or raise `error`, once what is there is taken."""
        self._ended, self._error = True, error
        self._changed.set()

    async def take(self) -> StepFrame | None:
        """Everything that is there as one frame with the newest load; None after the end."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        frames, self._frames = self._frames, []
        return merged(frames)
