"""The draft service through real gRPC on a free port, with a tiny random Llama and the n-gram drafter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from draft_service.lookup import NgramDrafter
from draft_service.loop import DraftLoop
from draft_service.model import DraftLimits, ModelDrafter
from draft_service.ngram_index import NgramOptions
from draft_service.service import SERVICE_NAME, DraftServicer
from specdecode import wire
from specdecode.errors import (
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
)
from specdecode.serving import Server, connect, error_from_rpc
from specdecode.types import (
    Draft,
    DrafterKind,
    DraftFrame,
    Method,
    ModelInfo,
    OpenDraft,
    Propose,
    SamplingParams,
)
from specdecode.v1 import draft_service_pb2 as pb
from specdecode.v1 import draft_service_pb2_grpc as pb_grpc
from tests.draft.tiny import VOCAB_SIZE, check_integrity, greedy_continuation, new_drafter, open_draft

DEADLINE = 30.0
MAX_MESSAGE_BYTES = 1 << 24
INFO = ModelInfo("tiny", "f1", VOCAB_SIZE, 256, "float32", "cpu", drafters=tuple(DrafterKind))


@dataclass
class Service:
    """A running draft service and what a test may look into."""

    server: Server
    loop: DraftLoop
    drafter: ModelDrafter
    stub: Any

    async def num_free_blocks(self) -> int:
        """Between two turns; the pool's invariants are proven."""

        def count() -> int:
            check_integrity(self.drafter)
            return self.drafter.lm.pool.num_free

        return await asyncio.wait_for(asyncio.wrap_future(self.loop.call(count)), DEADLINE)

    def stream(self) -> Stream:
        """A new stream."""
        return Stream(self.stub.Draft(timeout=DEADLINE))


class Stream:
    """A router's end of a stream."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._drafts: list[Draft] = []

    async def send(self, *orders: OpenDraft | Propose, closes: tuple[int, ...] = ()) -> None:
        """One frame."""
        opens = tuple(order for order in orders if isinstance(order, OpenDraft))
        proposes = tuple(order for order in orders if isinstance(order, Propose))
        await self.call.write(wire.draft_frame_to_proto(DraftFrame(opens, proposes, closes)))

    async def next(self) -> Draft:
        """The next draft; frames are taken apart."""
        while not self._drafts:
            message = await self.call.read()
            assert message is not grpc.aio.EOF, "the stream has ended"
            self._drafts += wire.drafts_frame_from_proto(message).drafts
        return self._drafts.pop(0)

    async def ask(self, *orders: OpenDraft | Propose) -> Draft:
        """One frame, and the next draft."""
        await self.send(*orders)
        return await self.next()


@asynccontextmanager
async def running(
    max_sequences: int = 16, drafter: ModelDrafter | None = None, ngram_only: bool = False
) -> AsyncIterator[Service]:
    drafter = drafter or new_drafter()
    ngram = NgramDrafter(NgramOptions())
    drafters = {DrafterKind.NGRAM: ngram} | ({} if ngram_only else {DrafterKind.MODEL: drafter})
    loop = DraftLoop(drafters, max_sequences)
    server = Server([SERVICE_NAME], MAX_MESSAGE_BYTES)
    pb_grpc.add_DraftServiceServicer_to_server(
        DraftServicer(loop, INFO, server.draining, MAX_MESSAGE_BYTES), server.grpc
    )
    port = await server.start("127.0.0.1", 0)
    loop.start()
    try:
        async with connect(f"127.0.0.1:{port}", MAX_MESSAGE_BYTES) as channel:
            yield Service(server, loop, drafter, pb_grpc.DraftServiceStub(channel))
    finally:
        await server.drain(None)
        await asyncio.to_thread(loop.stop)
    loop.ended.result(0)


def prompt(number: int) -> list[int]:
    return [(number * 7 + i * i) % VOCAB_SIZE for i in range(10 + number)]


async def test_the_model_is_introduced() -> None:
    async with running() as service:
        response = await service.stub.GetDraftModel(pb.GetDraftModelRequest(), timeout=DEADLINE)
        assert wire.model_info_from_proto(response.model) == INFO


async def test_both_drafters_draft_in_one_frame_and_go_on_after_commits() -> None:
    async with running() as service:
        stream = service.stream()
        text = [1, 2, 3, 4, 1, 2]
        await stream.send(
            open_draft(1, prompt(1)),
            open_draft(2, text, drafter=DrafterKind.NGRAM),
            Propose(1, 11, (), 3),
            Propose(2, 6, (), 2),
        )
        drafts = {draft.sequence: draft for draft in [await stream.next(), await stream.next()]}
        assert drafts[1].token_ids == greedy_continuation(prompt(1), 3)
        assert drafts[2].token_ids == (3, 4)
        accepted = (*drafts[1].token_ids[:2], 5)
        draft = await stream.ask(Propose(1, 11, accepted, 3))
        assert draft.committed_length == 14
        assert draft.token_ids == greedy_continuation([*prompt(1), *accepted], 3)
        assert draft.seconds > 0


async def test_q_travels_as_it_was_drawn_from() -> None:
    async with running() as service:
        order = open_draft(1, prompt(1), Method.REJECTION, SamplingParams(temperature=0.9, top_k=5))
        draft = await service.stream().ask(order, Propose(1, 11, (), 4))
        assert draft.q is not None
        assert draft.q.sizes.tolist() == [5] * 4
        assert draft.q.probs.reshape(4, 5).sum(axis=1) == pytest.approx([1] * 4, abs=1e-6)


async def test_streams_share_the_service_but_not_their_numbers() -> None:
    async with running() as service:
        streams = [service.stream() for _ in range(3)]
        for number, stream in enumerate(streams):
            await stream.send(open_draft(1, prompt(number)), Propose(1, 10 + number, (), 4))
        for number, stream in enumerate(streams):
            assert (await stream.next()).token_ids == greedy_continuation(prompt(number), 4)
        await streams[0].send(closes=(1,))
        assert isinstance((await streams[0].ask(Propose(1, 10, (), 4))).error, NotFoundError)
        assert (await streams[1].ask(Propose(1, 11, (), 2))).token_ids == greedy_continuation(prompt(1), 2)


async def test_closing_frees_the_blocks() -> None:
    async with running() as service:
        stream = service.stream()
        await stream.ask(open_draft(1, prompt(1)), Propose(1, 11, (), 3))
        assert await service.num_free_blocks() < 256
        await stream.send(closes=(1,))
        # Frames are taken in in order, so the answer to the next one tells that this one was.
        await stream.ask(Propose(1, 11, (), 3))
        assert await service.num_free_blocks() == 256


async def until_room(service: Service) -> None:
    """Returns when a sequence can be opened, and none is open but that, which is closed again."""
    stream = service.stream()
    while True:
        draft = await stream.ask(open_draft(1, [1, 2]), Propose(1, 2, (), 0))
        if draft.error is None:
            break
        assert isinstance(draft.error, ResourceExhaustedError)
    await stream.send(closes=(1,))
    await stream.ask(Propose(1, 2, (), 0))


@pytest.mark.parametrize("state", ["idle", "drafting", "in prefill", "not taken in"])
async def test_losing_the_stream_frees_everything(state: str) -> None:
    drafter = new_drafter(limits=DraftLimits(prefill_chunk=8))
    async with running(max_sequences=2, drafter=drafter) as service:
        stream = service.stream()
        held = threading.Event()
        long = [number % VOCAB_SIZE for number in range(250)]
        match state:
            case "idle":
                await stream.ask(open_draft(1, prompt(1)), open_draft(2, long), Propose(1, 11, (), 2))
            case "drafting":
                await stream.ask(open_draft(1, prompt(1)), open_draft(2, prompt(2)), Propose(1, 11, (), 2))
                await stream.send(Propose(1, 11, (), 32), Propose(2, 12, (), 32))
            case "in prefill":
                await stream.send(open_draft(1, long), open_draft(2, long), Propose(1, 250, (), 4))
            case _:
                service.loop.call(held.wait, DEADLINE)
                await stream.send(open_draft(1, prompt(1)), open_draft(2, long))
        stream.call.cancel()
        held.set()
        await asyncio.wait_for(until_room(service), DEADLINE)
        assert await service.num_free_blocks() == 256


async def test_an_unknown_sequence_is_answered_and_the_stream_goes_on() -> None:
    async with running() as service:
        stream = service.stream()
        draft = await stream.ask(Propose(9, 3, (), 2))
        assert (draft.sequence, draft.committed_length) == (9, 3)
        assert isinstance(draft.error, NotFoundError)
        assert draft.error.reason is Reason.SEQUENCE_UNKNOWN
        draft = await stream.ask(open_draft(9, prompt(1)), Propose(9, 11, (), 2))
        assert draft.token_ids == greedy_continuation(prompt(1), 2)


async def test_a_full_table_refuses_in_the_frame_and_once() -> None:
    async with running(max_sequences=2) as service:
        stream = service.stream()
        await stream.send(
            *(open_draft(n, prompt(n)) for n in range(3)), Propose(2, 12, (), 1), Propose(1, 11, (), 1)
        )
        refused, drafted = await stream.next(), await stream.next()
        assert (refused.sequence, drafted.sequence) == (2, 1)
        assert isinstance(refused.error, ResourceExhaustedError)
        assert refused.error.retry_after is not None
        await stream.send(closes=(0,))
        draft = await stream.ask(open_draft(2, prompt(2)), Propose(2, 12, (), 2))
        assert draft.token_ids == greedy_continuation(prompt(2), 2)


GOOD = open_draft(1, [1, 2, 3])


@pytest.mark.parametrize(
    ("orders", "field", "description"),
    [
        (
            (replace(GOOD, token_ids=(1, VOCAB_SIZE, 2)),),
            "token_ids",
            "id 61 is refused; the vocabulary has 61 ids",
        ),
        ((GOOD, Propose(1, 3, (4, 99), 2)), "token_ids", "id 99 is refused; the vocabulary has 61 ids"),
        ((GOOD, Propose(1, 4, (4,), 2)), "from_length", "4 is refused; at most the 3 tokens known"),
        ((GOOD, Propose(1, 0, (), 2)), "token_ids", "no committed token is left; at least 1"),
        (
            (replace(GOOD, sampling=SamplingParams(temperature=0.0, logit_bias=((61, 1.0),))),),
            "sampling.logit_bias",
            "id 61 is refused; the vocabulary has 61 ids",
        ),
    ],
)
async def test_a_bad_order_fails_its_sequence_alone_and_names_the_field(
    orders: tuple[OpenDraft | Propose, ...], field: str, description: str
) -> None:
    async with running() as service:
        stream = service.stream()
        await stream.send(open_draft(2, prompt(2)))
        draft = await stream.ask(*orders)
        assert draft.sequence == 1
        assert isinstance(draft.error, InvalidArgumentError)
        assert draft.error.violations == (FieldViolation(field, description),)
        draft = await stream.ask(Propose(2, 12, (), 2))
        assert draft.token_ids == greedy_continuation(prompt(2), 2)
        await stream.send(closes=(2,))
        unknown = await stream.ask(Propose(1, 3, (), 2))
        assert isinstance(unknown.error, NotFoundError)
        assert await service.num_free_blocks() == 256


async def test_a_drafter_that_is_not_offered_is_refused() -> None:
    async with running(ngram_only=True) as service:
        draft = await service.stream().ask(GOOD, Propose(1, 3, (), 1))
        assert isinstance(draft.error, InvalidArgumentError)
        assert draft.error.violations == (FieldViolation("drafter", "model is not offered; ngram is"),)


async def test_opening_twice_is_refused_and_closes() -> None:
    async with running() as service:
        stream = service.stream()
        await stream.ask(GOOD, Propose(1, 3, (), 1))
        draft = await stream.ask(GOOD)
        assert draft.error is not None
        assert draft.error.reason is Reason.SEQUENCE_EXISTS
        assert await service.num_free_blocks() == 256


def bad_open(**changes: Any) -> pb.DraftRequest:
    message = wire.draft_frame_to_proto(DraftFrame(opens=(GOOD,)))
    for name, value in changes.items():
        message.opens[0].ClearField(name)
        if isinstance(value, list):
            getattr(message.opens[0], name).extend(value)
        else:
            setattr(message.opens[0], name, value)
    return message


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (bad_open(method=0), "opens[0].method"),
        (bad_open(drafter=77), "opens[0].drafter"),
        (bad_open(token_ids=[]), "opens[0].token_ids"),
        (bad_open(num_prompt_tokens=0), "opens[0].num_prompt_tokens"),
        (bad_open(num_prompt_tokens=4), "opens[0].num_prompt_tokens"),
        (
            pb.DraftRequest(proposes=[pb.Propose(sequence=1, from_length=3, num_draft_tokens=33)]),
            "proposes[0].num_draft_tokens",
        ),
    ],
)
async def test_a_frame_that_does_not_hang_together_ends_the_stream_and_frees_it(
    request_message: pb.DraftRequest, field: str
) -> None:
    async with running(max_sequences=1) as service:
        stream = service.stream()
        await stream.ask(open_draft(5, prompt(1)), Propose(5, 11, (), 1))
        await stream.call.write(request_message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.next()
        error = error_from_rpc(caught.value)
        assert isinstance(error, InvalidArgumentError)
        assert [violation.field for violation in error.violations] == [field]
        await asyncio.wait_for(until_room(service), DEADLINE)
        assert await service.num_free_blocks() == 256


async def test_a_half_closed_stream_gets_its_drafts_and_ends() -> None:
    async with running() as service:
        stream = service.stream()
        await stream.send(open_draft(1, prompt(1)), Propose(1, 11, (), 9))
        await stream.call.done_writing()
        assert (await stream.next()).token_ids == greedy_continuation(prompt(1), 9)
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK
        assert await service.num_free_blocks() == 256


async def test_draining_refuses_new_sequences_and_lets_open_ones_finish() -> None:
    async with running() as service:
        busy, idle = service.stream(), service.stream()
        await busy.ask(open_draft(1, prompt(1)), Propose(1, 11, (), 1))
        await idle.ask(open_draft(1, prompt(1)), Propose(1, 11, (), 1))
        await idle.send(closes=(1,))
        draining = asyncio.create_task(service.server.drain(DEADLINE))
        assert await idle.call.read() is grpc.aio.EOF
        refused = await busy.ask(open_draft(2, prompt(2)), Propose(2, 12, (), 1))
        assert isinstance(refused.error, UnavailableError)
        assert refused.error.reason is Reason.DRAINING
        assert (await busy.ask(Propose(1, 11, (), 3))).token_ids == greedy_continuation(prompt(1), 3)
        await busy.send(closes=(1,))
        assert await busy.call.read() is grpc.aio.EOF
        assert await busy.call.code() is grpc.StatusCode.OK
        await asyncio.wait_for(draining, DEADLINE)


async def test_the_event_loop_does_not_wait_for_the_worker() -> None:
    async with running() as service:
        stream = service.stream()
        held = threading.Event()
        service.loop.call(held.wait, DEADLINE)
        try:
            await stream.send(open_draft(1, prompt(1)), Propose(1, 11, (), 1))
            await service.stub.GetDraftModel(pb.GetDraftModelRequest(), timeout=DEADLINE)
        finally:
            held.set()
        assert (await stream.next()).token_ids == greedy_continuation(prompt(1), 1)


async def test_a_failing_drafter_costs_drafts_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as service:
        stream = service.stream()
        await stream.ask(open_draft(1, prompt(1)), Propose(1, 11, (), 1))

        def fail(*args: Any) -> None:
            raise RuntimeError("the device is lost")

        with monkeypatch.context() as patched:
            patched.setattr(service.drafter.lm, "forward_columns", fail)
            draft = await stream.ask(Propose(1, 11, (), 2))
        assert isinstance(draft.error, InternalError)
        assert "the device is lost" not in draft.error.message
        draft = await stream.ask(open_draft(1, prompt(1)), Propose(1, 11, (), 2))
        assert draft.token_ids == greedy_continuation(prompt(1), 2)
