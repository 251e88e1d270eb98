"""Clients that cancel, vanish, lag or ask for too much: nothing stays behind, and nobody else notices."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.text import Tokenizer
from specdecode.errors import Reason, ResourceExhaustedError
from specdecode.lm.runner import Chunk
from specdecode.serving import error_from_rpc
from specdecode.types import Draft
from specdecode.v1 import router_service_pb2_grpc as router_grpc
from specdecode.wire import piece_from_proto
from tests.router import tiny
from tests.router.client import MODEL, NGRAM, PROMPT, greedy, request_for, speculating
from tests.router.scripted import Ask, scripted_drafts
from tests.services import DEADLINE, Answer, Services, Target, eventually, refusal

LONG_PROMPT = [20 + index % 200 for index in range(150)]


class Gate:
    """Holds the target's step at the first forward that `when` recognises, until it is opened."""

    def __init__(self, target: Target, when: Callable[[Sequence[Chunk]], bool]) -> None:
        self.target = target
        self._held = threading.Event()
        self._opened = threading.Event()
        lm: Any = target.replica.engine.lm
        forward = lm.forward

        def gated(chunks: Sequence[Chunk]) -> Any:
            if when(chunks) and not self._opened.is_set():
                self._held.set()
                assert self._opened.wait(DEADLINE)
            return forward(chunks)

        lm.forward = gated

    async def holds(self) -> None:
        """Waits until a step is held."""
        assert await asyncio.to_thread(self._held.wait, DEADLINE)

    def open(self) -> None:
        """Lets the step go on, and all later ones."""
        self._opened.set()


def is_prefill(chunks: Sequence[Chunk]) -> bool:
    return any(chunk.num_logits == 0 for chunk in chunks)


def is_verification(chunks: Sequence[Chunk]) -> bool:
    return any(chunk.num_logits > 1 for chunk in chunks)


def is_plain(chunks: Sequence[Chunk]) -> bool:
    return any(chunk.num_logits == 1 and len(chunk.token_ids) == 1 for chunk in chunks)


@pytest.mark.parametrize(
    ("stage", "when", "num_draft_tokens"),
    [("prefill", is_prefill, 0), ("verification", is_verification, 4), ("lease", is_plain, 0)],
)
async def test_cancelling_within_a_step_frees_everything_with_the_next(
    model: Path, stage: str, when: Callable[[Sequence[Chunk]], bool], num_draft_tokens: int
) -> None:
    settings = {"prefill_chunk": 64}
    async with Services.started(model, model, target=settings) as services:
        gate = Gate(services.target, when)
        request = request_for(LONG_PROMPT, temperature=0, max_tokens=50, ignore_eos=True)
        call = services.router.call(speculating(request, num_draft_tokens, MODEL))
        await gate.holds()
        num_steps = services.target.num_steps
        call.cancel()
        await eventually(lambda: services.target.has_orders, "the target is told while its step runs")
        gate.open()
        await services.all_is_free()
        assert services.target.num_steps == num_steps + 1, stage


def never(ask: Ask) -> Draft | None:
    return None


@asynccontextmanager
async def waiting_for_drafts(model: Path, **settings: Any) -> AsyncIterator[tuple[Services, Any, Any]]:
    """A request whose drafts never come, its call, and the draft service that keeps it waiting."""
    async with (
        scripted_drafts(never) as (service, address),
        Services.started(model, draft_address=address, draft_deadline_seconds=60.0, **settings) as services,
    ):
        request = speculating(request_for(temperature=0, max_tokens=50), 4, NGRAM)
        call = services.router.call(request)
        async with asyncio.timeout(DEADLINE):
            await service.asked.wait()
        yield services, call, service


async def test_cancelling_between_rounds_frees_everything_on_target_and_draft(model: Path) -> None:
    async with waiting_for_drafts(model) as (services, call, service):
        assert len(service.open) == 1
        call.cancel()
        await services.all_is_free()
        await eventually(lambda: not service.open, "the draft service is told")


async def test_cancelling_while_queued_frees_the_place_in_the_queue(model: Path) -> None:
    async with waiting_for_drafts(model, target={"max_running": 1}) as (services, call, _):
        queued = services.router.call(request_for(temperature=0, max_tokens=50))
        waiting = services.target.replica.engine.scheduler.waiting
        await eventually(lambda: len(waiting) == 1, "the second request waits")
        queued.cancel()
        await eventually(lambda: len(waiting) == 0, "its place is free")
        assert services.target.num_sequences == 1
        call.cancel()
        await services.all_is_free()


async def test_cancelling_frees_all_choices(model: Path) -> None:
    async with Services.started(model, model) as services:
        request = speculating(request_for(max_tokens=200, ignore_eos=True), 2, MODEL)
        request.n = 5
        call = services.router.call(request)
        await call.read()
        call.cancel()
        await services.all_is_free()
        assert (await services.router.status()).num_requests == 0


VANISHING = """
import sys, grpc
from specdecode.v1 import router_service_pb2 as pb, router_service_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1])
request = pb.GenerateRequest(text="the fox", include_rounds=True)
request.sampling.ignore_eos = True
request.speculation.mode = pb.SPECULATION_MODE_OFF
for message in router_service_pb2_grpc.RouterServiceStub(channel).Generate(request):
    print("heard", flush=True)
"""


async def test_a_client_that_vanishes_leaves_nothing_behind(model: Path) -> None:
    async with Services.started(model, model) as services:
        gate = Gate(services.target, is_plain)
        address = f"127.0.0.1:{services.router.running.server.port}"
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", VANISHING, address, stdout=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        assert await asyncio.wait_for(client.stdout.readline(), DEADLINE) == b"heard\n"
        await gate.holds()
        client.kill()
        await client.wait()
        gate.open()
        await services.all_is_free()


async def test_a_router_that_ends_leaves_nothing_behind(model: Path) -> None:
    async with Services.started(model, model) as services:
        request = speculating(request_for(max_tokens=200, ignore_eos=True), 4, MODEL)
        call = services.router.call(request)
        await call.read()
        await services.router.stop()
        await services.all_is_free()


async def test_a_call_ends_at_its_deadline_and_frees_everything(model: Path) -> None:
    async with Services.started(model, model) as services:
        gate = Gate(services.target, is_plain)
        request = speculating(request_for(max_tokens=200), 0, NGRAM)
        error = await refusal(services.router.call(request, timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.open()
        await services.all_is_free()


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context that no buffer on the way to a client holds."""
    path = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("roomy"))
    return tiny.save_llama(path, Tokenizer(path).vocab_size, max_length=2048)


@asynccontextmanager
async def narrow_channel(services: Services) -> AsyncIterator[Any]:
    """A client's connection that takes little in advance."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 * 1024)]
    address = f"127.0.0.1:{services.router.running.server.port}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield router_grpc.RouterServiceStub(channel)


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_a_client_that_does_not_read_pauses_itself_and_nobody_else(
    roomy_model: Path, byte_level: Tokenizer, num_draft_tokens: int
) -> None:
    max_tokens = 1800
    quick_ids = greedy(roomy_model, byte_level.encode_text(PROMPT), 20)
    slow = request_for(temperature=0, max_tokens=max_tokens, logprobs=20, ignore_eos=True)
    async with (
        Services.started(roomy_model, target={"num_blocks": 256}) as services,
        narrow_channel(services) as stub,
    ):
        call = stub.Generate(speculating(slow, num_draft_tokens, NGRAM))
        engine = services.target.replica.engine
        await eventually(lambda: bool(engine.sequences), "the slow client's sequence runs")
        (sequence,) = engine.sequences.values()

        async def stands_still_while_others_are_served() -> bool:
            before = sequence.num_output
            quick = await services.generate_one(request_for(temperature=0, max_tokens=20))
            assert quick.ids == quick_ids
            assert sequence.num_output < max_tokens, "it ran to its end unread"
            return before == sequence.num_output

        await eventually(stands_still_while_others_are_served, "the slow client's sequence is paused")
        answer = Answer()
        while (message := await call.read()) is not grpc.aio.EOF:
            answer.hear(piece_from_proto(message))
        assert len(answer.ids) == max_tokens
        assert answer.ids[:20] == quick_ids
        assert [token.logprobs and token.logprobs.token_id for token in answer.tokens] == answer.ids
        await services.all_is_free()


async def test_more_requests_than_may_be_are_refused_with_when_to_retry(model: Path) -> None:
    async with waiting_for_drafts(model, max_requests=1) as (services, call, _):
        error = error_from_rpc(await refusal(services.router.call(request_for(max_tokens=1))))
        assert isinstance(error, ResourceExhaustedError)
        assert error.reason is Reason.QUEUE_FULL
        assert error.retry_after is not None
        call.cancel()
        await services.all_is_free()

        async def is_counted() -> bool:
            return (await services.router.status()).num_requests == 0

        await eventually(is_counted, "the place is free")
        assert len((await services.generate_one(request_for(max_tokens=1))).ids) == 1


async def test_a_choice_that_fails_alone_is_told_on_its_piece(model: Path) -> None:
    async with Services.started(model, target={"max_waiting": 1}) as services:
        request = request_for(seed=1, max_tokens=20)
        request.n = 3
        first, *others = await services.generate(request)
        assert first.error is None
        assert first.usage is not None
        assert len(first.ids) == first.usage.num_emitted > 0
        for other in others:
            assert isinstance(other.error, ResourceExhaustedError)
            assert other.error.reason is Reason.QUEUE_FULL
            assert other.finish_reason is None
            assert other.ids == []


async def test_the_only_choices_error_ends_the_call_with_its_details(model: Path) -> None:
    async with Services.started(model, target={"max_waiting": 0}) as services:
        error = error_from_rpc(await refusal(services.router.call(request_for(max_tokens=1))))
        assert isinstance(error, ResourceExhaustedError)
        assert error.reason is Reason.QUEUE_FULL
        assert error.retry_after is not None
        await services.all_is_free()


async def test_many_clients_at_once_get_what_each_would_get_alone(model: Path, byte_level: Tokenizer) -> None:
    prompts = [
        "the quick",
        "the lazy dog and",
        "def add(a, b):",
        "stop",
        "jumps over the lazy dog",
        "fox",
        "a",
        "and",
    ]
    async with Services.started(model, model) as services:
        calls = [
            services.generate_one(
                speculating(request_for(prompt, temperature=0, max_tokens=40), index % 5, kind)
            )
            for index, prompt in enumerate(prompts)
            for kind in (NGRAM, MODEL)
        ]
        answers = await asyncio.gather(*calls)
        for index, prompt in enumerate(prompts):
            expected = greedy(model, byte_level.encode_text(prompt), 40)
            assert [answer.ids for answer in answers[2 * index : 2 * index + 2]] == [expected] * 2
        await services.all_is_free()
