"""Connections to targets and to the draft service: one stream each, which comes back by itself.

A `Link` connects, checks that the other side means the same ids as the router's tokenizer, opens the stream
and passes its frames on; when the stream breaks it says so and starts again, waiting longer each time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import grpc

from specdecode import __version__
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    Reason,
    SpecdecodeError,
    UnavailableError,
)
from specdecode.serving import connect, error_from_rpc, pause
from specdecode.tls import ClientTls, why_refused
from specdecode.types import (
    DecodeFrame,
    Draft,
    DrafterKind,
    DraftFrame,
    DraftsFrame,
    LoadSnapshot,
    ModelInfo,
    StepFrame,
    StepResult,
)
from specdecode.v1 import draft_service_pb2 as draft_pb
from specdecode.v1 import draft_service_pb2_grpc as draft_grpc
from specdecode.v1 import target_service_pb2 as target_pb
from specdecode.v1 import target_service_pb2_grpc as target_grpc
from specdecode.wire import (
    decode_frame_to_proto,
    draft_frame_to_proto,
    draft_from_proto,
    drafter_costs_from_proto,
    load_snapshot_from_proto,
    messages_within,
    model_info_from_proto,
    step_costs_from_proto,
    step_frame_from_proto,
)

logger = logging.getLogger(__name__)

_HELLO_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0

Sent = TypeVar("Sent", DecodeFrame, DraftFrame)
Received = TypeVar("Received", StepFrame, DraftsFrame)


@dataclass(frozen=True)
class Listener(Generic[Received]):
    """Whom a link tells, from the event loop; each returns at once."""

    on_up: Callable[[], None]
    on_frame: Callable[[Received], None]
    on_down: Callable[[], None]


class Link(ABC, Generic[Sent, Received]):
    """One replica's stream.

    Attributes:
        address: host:port.
        info: what the replica said of itself last, None before.
        up: whether the stream stands and the replica may be used.
        epoch: number of the stream, from 1.
        first_contact: done when the replica has answered for the first time; raises if it must not be used.
    """

    kind: str

    def __init__(
        self,
        address: str,
        max_message_bytes: int,
        fingerprint: str,
        listener: Listener[Received],
        tls: ClientTls | None = None,
    ) -> None:
        """`fingerprint` is the router's tokenizer's; certificates are read at each connection."""
        self.address = address
        self.info: ModelInfo | None = None
        self.up = False
        self.epoch = 0
        self.first_contact: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_contact.add_done_callback(_look_at)
        self._max_message_bytes = max_message_bytes
        self._fingerprint = fingerprint
        self._tls = tls
        self._listener: Listener[Received] = listener
        self._pending: list[Sent] = []
        self._has_pending = asyncio.Event()

    def send(self, frame: Sent) -> None:
        """Sends a frame soon; does nothing while the link is down."""
        if self.up and frame:
            self._pending.append(frame)
            self._has_pending.set()

    async def run(self) -> None:
        """Connects again and again, until cancelled."""
        seconds, told = _FIRST_PAUSE_SECONDS, ""
        while True:
            epoch = self.epoch
            problem = await self._run_stream()
            if self.epoch > epoch:
                seconds, told = _FIRST_PAUSE_SECONDS, ""
            # A service that starts beside the router is not there at first.
            starting = not self.first_contact.done() and isinstance(problem, UnavailableError)
            level = logging.INFO if starting else logging.WARNING
            level = logging.DEBUG if problem.message == told else level
            logger.log(level, "%s %s: %s; trying again", self.kind, self.address, problem.message)
            told = problem.message
            await pause(seconds * random.uniform(0.75, 1.25))
            seconds = min(2 * seconds, _LONGEST_PAUSE_SECONDS)

    async def _run_stream(self) -> SpecdecodeError:
        """One connection from beginning to end; what ended it."""
        try:
            async with connect(self.address, self._max_message_bytes, self._tls) as channel:
                self.info = await self._hello(channel)
                self._check(self.info)
                self._greeted(None)
                await self._exchange(self._open(channel))
        except grpc.aio.AioRpcError as error:
            return await self._in_words(error_from_rpc(error))
        except FailedPreconditionError as error:
            self._greeted(error)
            return error
        except SpecdecodeError as error:
            return InternalError(f"it sent what can't be read: {error.message}")
        return UnavailableError("the stream was ended")

    async def _in_words(self, error: SpecdecodeError) -> SpecdecodeError:
        """The error, or what is wrong with TLS where gRPC could not connect."""
        unreachable = isinstance(error, UnavailableError) and not self.up
        reason = await why_refused(self.address, self._tls) if unreachable else None
        return error if reason is None else UnavailableError(reason)

    def _greeted(self, refusal: SpecdecodeError | None) -> None:
        if self.first_contact.done():
            return
        if refusal is None:
            self.first_contact.set_result(None)
        else:
            self.first_contact.set_exception(refusal)

    def _check(self, info: ModelInfo) -> None:
        """Refuses a replica that must not be used.

        Raises:
            FailedPreconditionError: another version of the package, or another vocabulary.
        """
        if info.version not in ("", __version__):
            raise FailedPreconditionError(
                f"the {self.kind} at {self.address} runs specdecode {info.version}, the router "
                f"{__version__}: install one version on all",
                reason=Reason.VERSION_MISMATCH,
            )
        self._check_vocabulary(info)

    def _check_vocabulary(self, info: ModelInfo) -> None:
        if info.fingerprint != self._fingerprint:
            raise FailedPreconditionError(
                f"the {self.kind} at {self.address} ({info.name}) has another vocabulary than the router: "
                f"its fingerprint is {info.fingerprint}, that of the router's tokenizer {self._fingerprint}",
                reason=Reason.VOCABULARY_MISMATCH,
            )

    async def _exchange(self, call: Any) -> None:
        """Passes frames both ways until the stream ends."""
        self.epoch += 1
        self.up = True
        self._pending.clear()
        logger.info("%s %s is connected (%s)", self.kind, self.address, self.info and self.info.name)
        writer = asyncio.create_task(self._write(call))
        try:
            self._listener.on_up()
            while (message := await call.read()) is not grpc.aio.EOF:
                self._listener.on_frame(self._decode(message))
        finally:
            self.up = False
            writer.cancel()
            call.cancel()
            self._listener.on_down()

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._has_pending.wait()
                self._has_pending.clear()
                frames, self._pending = self._pending, []
                for frame in frames:
                    for part, message in messages_within(self._max_message_bytes, frame, self._encode):
                        if message.ByteSize() > self._max_message_bytes:
                            self._listener.on_frame(self._refuse(part, message.ByteSize()))
                        else:
                            await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader learns why
        finally:
            # Whatever ended it: a link that is up but silent would hold its requests for ever.
            call.cancel()

    @abstractmethod
    async def _hello(self, channel: grpc.aio.Channel) -> ModelInfo:
        """Asks the replica what it is."""

    @abstractmethod
    def _open(self, channel: grpc.aio.Channel) -> Any:
        """Starts the stream."""

    def _too_large(self, num_bytes: int) -> SpecdecodeError:
        limit = f"{num_bytes} bytes to the {self.kind}; at most {self._max_message_bytes} in one message"
        return InvalidArgumentError.of("request", f"takes {limit}")

    @abstractmethod
    def _encode(self, frame: Sent) -> Any:
        """The message of a frame."""

    @abstractmethod
    def _refuse(self, frame: Sent, num_bytes: int) -> Received:
        """Answers the frame's only order, which is too large to be sent, in the replica's stead."""

    @abstractmethod
    def _decode(self, message: Any) -> Received:
        """The frame in a message."""


def _identity(info: ModelInfo) -> tuple[str, str, int]:
    """What must be equal for a text to go on elsewhere."""
    return info.name, info.dtype, info.num_parameters


def _look_at(contact: asyncio.Future[None]) -> None:
    """A refusal is logged where it happens; asyncio need not complain if nobody waits for it."""
    if not contact.cancelled():
        contact.exception()


class TargetLink(Link[DecodeFrame, StepFrame]):
    """A target replica.

    Attributes:
        load: the replica's, at the end of the last step that the router heard of.
        draining: the replica opens nothing any more; until the link comes up anew.
        costs: of its steps, as it measured them last; None where it did not. `load.cost_ratio` corrects
            them.
        pool: what the other replicas serve that may be used.
    """

    kind = "target"
    pool: Callable[[], Sequence[ModelInfo]] = staticmethod(lambda: ())
    load = LoadSnapshot()
    draining = False
    costs: StepCosts | None = None
    _step = 0

    async def _hello(self, channel: grpc.aio.Channel) -> ModelInfo:
        stub = target_grpc.TargetServiceStub(channel)
        reply = await stub.GetTargetModel(target_pb.GetTargetModelRequest(), timeout=_HELLO_SECONDS)
        self.load, self.draining = load_snapshot_from_proto(reply.load), False
        self.costs = step_costs_from_proto(reply.costs) if reply.HasField("costs") else None
        return model_info_from_proto(reply.model)

    def _check(self, info: ModelInfo) -> None:
        """Also refuses another model than the others serve: a text would go on on it."""
        super()._check(info)
        others = {_identity(other) for other in self.pool()} - {_identity(info)}
        if others:
            raise FailedPreconditionError(
                f"the target at {self.address} serves {' '.join(map(str, _identity(info)))}, other replicas "
                f"{' '.join(map(str, others.pop()))}: one pool serves one model",
                reason=Reason.MODEL_MISMATCH,
            )

    def _open(self, channel: grpc.aio.Channel) -> Any:
        return target_grpc.TargetServiceStub(channel).Decode()

    def _encode(self, frame: DecodeFrame) -> Any:
        return decode_frame_to_proto(frame)

    def _refuse(self, frame: DecodeFrame, num_bytes: int) -> StepFrame:
        error = self._too_large(num_bytes)
        results = tuple(StepResult(o.sequence, len(o.token_ids), error=error) for o in frame.opens)
        return StepFrame(self._step, self.load, results)

    def _decode(self, message: Any) -> StepFrame:
        frame = step_frame_from_proto(message)
        self._step, self.load = frame.step, frame.load
        self.costs = frame.costs or self.costs
        return frame


class DraftLink(Link[DraftFrame, DraftsFrame]):
    """The draft service.

    Attributes:
        costs: of its drafters that were measured.
    """

    kind = "draft"
    costs: Mapping[DrafterKind, DraftCosts] = MappingProxyType({})

    def _check_vocabulary(self, info: ModelInfo) -> None:
        if info.fingerprint:  # lookup drafters alone have no vocabulary of their own
            super()._check_vocabulary(info)

    async def _hello(self, channel: grpc.aio.Channel) -> ModelInfo:
        stub = draft_grpc.DraftServiceStub(channel)
        reply = await stub.GetDraftModel(draft_pb.GetDraftModelRequest(), timeout=_HELLO_SECONDS)
        self.costs = drafter_costs_from_proto(reply.costs)
        return model_info_from_proto(reply.model)

    def _open(self, channel: grpc.aio.Channel) -> Any:
        return draft_grpc.DraftServiceStub(channel).Draft()

    def _encode(self, frame: DraftFrame) -> Any:
        return draft_frame_to_proto(frame)

    def _refuse(self, frame: DraftFrame, num_bytes: int) -> DraftsFrame:
        """The drafter is not asked for this choice again."""
        error = self._too_large(num_bytes)
        opens = (Draft(o.sequence, len(o.token_ids), error=error) for o in frame.opens)
        proposes = (Draft(o.sequence, o.from_length + len(o.token_ids), error=error) for o in frame.proposes)
        return DraftsFrame((*opens, *proposes))

    def _decode(self, message: Any) -> DraftsFrame:
        """A draft that does not hang together counts as failed; the others are fine."""
        return DraftsFrame(tuple(map(_draft_from_proto, message.drafts)))


def _draft_from_proto(message: Any) -> Draft:
    try:
        return draft_from_proto(message)
    except InvalidArgumentError as error:
        refusal = InternalError(error.message, reason=Reason.INVALID_ARGUMENT)
        return Draft(message.sequence, message.committed_length, error=refusal)
