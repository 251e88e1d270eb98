"""The draft service's gRPC handlers: they translate, and pass frames between streams and the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from types import MappingProxyType

import grpc
from google.protobuf.message import DecodeError

from draft_service.loop import DraftLoop, DraftStream
from specdecode import wire
from specdecode.cost_tables import DraftCosts
from specdecode.errors import InvalidArgumentError, SpecdecodeError
from specdecode.serving import aborting
from specdecode.types import Draft, DrafterKind, DraftsFrame, ModelInfo
from specdecode.v1 import draft_service_pb2 as pb
from specdecode.v1 import draft_service_pb2_grpc as pb_grpc

SERVICE_NAME = "specdecode.v1.DraftService"

_MAX_BACKLOG = 1024
"""Frames that wait for the loop, or drafts that wait for a router, beyond which no more of its frames are
read; gRPC's flow control then holds it back."""


class DraftServicer(pb_grpc.DraftServiceServicer):  # type: ignore[misc]
    """specdecode.v1.DraftService.

    Args:
        loop: started; the servicer does not stop it.
        info: what GetDraftModel answers.
        draining: set when the service has begun to end.
        max_message_bytes: frames above it are told in several messages.
        costs: of the drafters that were measured.
    """

    def __init__(
        self,
        loop: DraftLoop,
        info: ModelInfo,
        draining: asyncio.Event,
        max_message_bytes: int,
        costs: Mapping[DrafterKind, DraftCosts] = MappingProxyType({}),
    ) -> None:
        self._loop = loop
        self._info = info
        self._draining = draining
        self._max_message_bytes = max_message_bytes
        self._costs = costs

    async def GetDraftModel(
        self,
        request: pb.GetDraftModelRequest,
        context: grpc.aio.ServicerContext[pb.GetDraftModelRequest, pb.GetDraftModelResponse],
    ) -> pb.GetDraftModelResponse:
        """What is served, and what drafting costs."""
        costs = wire.drafter_costs_to_proto(self._costs)
        return pb.GetDraftModelResponse(model=wire.model_info_to_proto(self._info), costs=costs)

    async def Draft(
        self,
        request_iterator: AsyncIterator[pb.DraftRequest],
        context: grpc.aio.ServicerContext[pb.DraftRequest, pb.DraftResponse],
    ) -> AsyncIterator[pb.DraftResponse]:
        """Drafts for one router, until it ends the stream or is lost."""
        async with aborting(context), aclosing(self._drafts(request_iterator)) as frames:
            async for frame in frames:
                for _, message in wire.messages_within(
                    self._max_message_bytes, frame, wire.drafts_frame_to_proto
                ):
                    yield message

    async def _drafts(self, requests: AsyncIterator[pb.DraftRequest]) -> AsyncGenerator[DraftsFrame, None]:
        outbox = _Outbox()
        stream = self._loop.connect(partial(_put, asyncio.get_running_loop(), outbox))
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
            self._loop.disconnect(stream)

    async def _read(
        self, requests: AsyncIterator[pb.DraftRequest], stream: DraftStream, outbox: _Outbox
    ) -> None:
        """Hands in the router's frames; a frame that does not hang together ends the stream."""
        try:
            async for request in requests:
                self._loop.submit(stream, wire.draft_frame_from_proto(request))
                if self._loop.backlog > _MAX_BACKLOG:
                    await asyncio.wrap_future(self._loop.call(lambda: None))
                await outbox.has_room()
            self._loop.finish(stream)
        except DecodeError:
            outbox.fail(InvalidArgumentError.of("request", "is no DraftRequest"))
        except SpecdecodeError as error:
            outbox.fail(error)

    async def _drain(self) -> None:
        await self._draining.wait()
        self._loop.drain()


class _Outbox:
    """Drafts for one router; while it does not read, frames merge. Used within the event loop only."""

    def __init__(self) -> None:
        self._drafts: list[Draft] = []
        self._ended = False
        self._error: SpecdecodeError | None = None
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    async def has_room(self) -> None:
        """Waits while there is too much."""
        while len(self._drafts) > _MAX_BACKLOG:
            self._taken.clear()
            await self._taken.wait()

    def put(self, frame: DraftsFrame | None) -> None:
        """Adds a frame; None after the last."""
        if frame is None:
            self._ended = True
        else:
            self._drafts += frame.drafts
        self._changed.set()

    def fail(self, error: SpecdecodeError) -> None:
        """Makes `take` raise the error, once what is there is taken."""
        self._error = error
        self._changed.set()

    async def take(self) -> DraftsFrame | None:
        """All drafts that are there, at least one; None after the last."""
        while True:
            self._changed.clear()
            if self._drafts:
                drafts, self._drafts = self._drafts, []
                self._taken.set()
                return DraftsFrame(tuple(drafts))
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            await self._changed.wait()


def _put(events: asyncio.AbstractEventLoop, outbox: _Outbox, frame: DraftsFrame | None) -> None:
    """`_Outbox.put` from another thread."""
    events.call_soon_threadsafe(outbox.put, frame)
