"""A draft service of the test's own: real gRPC, drafts by a script, a strict eye on what the router sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdecode.cost_tables import DraftCosts
from specdecode.errors import NotFoundError, Reason
from specdecode.serving import server_options
from specdecode.types import Draft, DrafterKind, DraftFrame, DraftsFrame, ModelInfo, OpenDraft, Propose
from specdecode.v1 import draft_service_pb2 as pb
from specdecode.v1 import draft_service_pb2_grpc as pb_grpc
from specdecode.wire import (
    draft_frame_from_proto,
    drafter_costs_to_proto,
    drafts_frame_to_proto,
    model_info_to_proto,
)


class EndStream(Exception):
    """Raised by a script: the stream breaks here, with all that is open on it."""


@dataclass
class Ask:
    """One Propose: the sequence as it was opened, its committed tokens, and the order."""

    opened: OpenDraft
    tokens: list[int]
    order: Propose

    def draft(self, token_ids: tuple[int, ...], **fields: Any) -> Draft:
        """An answer to it."""
        return Draft(self.order.sequence, len(self.tokens), token_ids, **fields)


@dataclass(frozen=True)
class Held:
    """A draft that is sent when the test says so."""

    draft: Draft


Script = Callable[[Ask], Draft | Held | None]
"""The answer to an ask; None never answers."""


@dataclass
class ScriptedDrafts(pb_grpc.DraftServiceServicer):  # type: ignore[misc]
    """Answers by a script and remembers what it was asked.

    Attributes:
        asks: every Propose that was taken.
        asked: set when there is one.
        open: sequences that are open now.
        violations: what no router may send.
    """

    info: ModelInfo
    script: Script
    costs: Mapping[DrafterKind, DraftCosts] = field(default_factory=dict)
    num_streams: int = 0
    asks: list[Ask] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    open: dict[int, tuple[OpenDraft, list[int]]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    _held: list[Draft] = field(default_factory=list)
    _outgoing: asyncio.Queue[list[Draft] | EndStream] = field(default_factory=asyncio.Queue)

    def send_held(self) -> None:
        """Sends the drafts that were held back."""
        self._outgoing.put_nowait(self._held)
        self._held = []

    async def GetDraftModel(self, request: Any, context: Any) -> Any:
        costs = drafter_costs_to_proto(self.costs)
        return pb.GetDraftModelResponse(model=model_info_to_proto(self.info), costs=costs)

    async def Draft(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.num_streams += 1
        self.open.clear()
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                drafts = await self._outgoing.get()
                if isinstance(drafts, EndStream):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the script ends the stream")
                yield drafts_frame_to_proto(DraftsFrame(tuple(drafts)))
        finally:
            reader.cancel()
            self.open.clear()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                drafts = self._take(draft_frame_from_proto(request))
                if drafts:
                    self._outgoing.put_nowait(drafts)
        except EndStream as end:
            self._outgoing.put_nowait(end)

    def _take(self, frame: DraftFrame) -> list[Draft]:
        for opened in frame.opens:
            self._expect(opened.sequence not in self.open, f"sequence {opened.sequence} was opened twice")
            self.open[opened.sequence] = opened, list(opened.token_ids)
        drafts = []
        for order in frame.proposes:
            draft = self._propose(order)
            if isinstance(draft, Held):
                self._held.append(draft.draft)
            elif draft is not None:
                drafts.append(draft)
        for sequence in frame.closes:
            self.open.pop(sequence, None)
        return drafts

    def _propose(self, order: Propose) -> Draft | Held | None:
        if order.sequence not in self.open:
            self.violations.append(f"sequence {order.sequence} is not open")
            return Draft(order.sequence, order.committed_length, error=unknown_sequence())
        opened, tokens = self.open[order.sequence]
        self._expect(
            order.from_length == len(tokens), f"{order.from_length} is not what {len(tokens)} follows"
        )
        tokens.extend(order.token_ids)
        ask = Ask(opened, list(tokens), order)
        self.asks.append(ask)
        self.asked.set()
        draft = self.script(ask)
        if isinstance(draft, Draft) and draft.error is not None:
            del self.open[order.sequence]
        return draft

    def _expect(self, holds: bool, violation: str) -> None:
        if not holds:
            self.violations.append(violation)


def unknown_sequence() -> NotFoundError:
    """What a draft service says that has forgotten a sequence."""
    return NotFoundError("the sequence is not open", reason=Reason.SEQUENCE_UNKNOWN)


@asynccontextmanager
async def scripted_drafts(
    script: Script,
    fingerprint: str = "",
    costs: Mapping[DrafterKind, DraftCosts] | None = None,
    kinds: tuple[DrafterKind, ...] = (DrafterKind.NGRAM, DrafterKind.MODEL),
) -> AsyncIterator[tuple[ScriptedDrafts, str]]:
    """A running scripted draft service and its address."""
    info = ModelInfo("scripted", fingerprint, 0, 10**6, "", "", drafters=kinds)
    service = ScriptedDrafts(info, script, costs or {})
    server = grpc.aio.server(options=server_options(1 << 24))
    pb_grpc.add_DraftServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
