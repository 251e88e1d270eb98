"""What is refused is refused by name, through real gRPC, and nothing is started."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from router import front
from router.parsing import parse_request
from specdecode.errors import InvalidArgumentError, NotFoundError, Reason
from specdecode.requests import MAX_CHAT_MESSAGES, MAX_LISTED_TOKEN_IDS
from specdecode.serving import error_from_rpc
from specdecode.v1 import router_service_pb2 as pb
from tests.router.client import request_for
from tests.services import DEADLINE, Services, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNKNOWN = 10**6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(model: Path) -> AsyncIterator[Services]:
    async with Services.started(model) as started:
        yield started


def changed(change: Callable[[Any], object]) -> Any:
    """A fine request after one change."""
    request = request_for(max_tokens=4)
    change(request)
    return request


REFUSED: dict[str, tuple[Any, str]] = {
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "empty text": (request_for(""), "text"),
    "empty chat": (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat"),
    "empty ids": (changed(lambda r: r.token_ids.SetInParent()), "token_ids"),
    "id outside the vocabulary": (request_for([5, UNKNOWN]), "token_ids.ids[1]"),
    "prompt one over the context": (request_for([5] * 256), "token_ids"),
    "prompt of 5 MiB": (request_for("a" * (5 * 2**20)), "text"),
    "chat of 5 MiB": (
        pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="a" * (5 * 2**20))])
        ),
        "chat",
    ),
    "max_tokens 0": (request_for(max_tokens=0), "sampling.max_tokens"),
    "max_tokens larger than the room": (request_for([5] * 250, max_tokens=7), "sampling.max_tokens"),
    "negative temperature": (request_for(temperature=-1), "sampling.temperature"),
    "NaN temperature": (request_for(temperature=math.nan), "sampling.temperature"),
    "top_p 0": (request_for(top_p=0), "sampling.top_p"),
    "top_p above 1": (request_for(top_p=1.5), "sampling.top_p"),
    "unknown id in logit_bias": (
        changed(lambda r: r.sampling.logit_bias.add(token_id=UNKNOWN, bias=1)),
        "sampling.logit_bias[0]",
    ),
    "unknown id in allowed": (
        changed(lambda r: r.sampling.allowed_token_ids.ids.append(UNKNOWN)),
        "sampling.allowed_token_ids[0]",
    ),
    "too many banned ids": (
        changed(lambda r: r.sampling.banned_token_ids.extend([5] * (MAX_LISTED_TOKEN_IDS + 1))),
        "sampling.banned_token_ids",
    ),
    "too many allowed ids": (
        changed(lambda r: r.sampling.allowed_token_ids.ids.extend([5] * (MAX_LISTED_TOKEN_IDS + 1))),
        "sampling.allowed_token_ids",
    ),
    "too many chat messages": (
        changed(
            lambda r: r.chat.messages.extend(
                [pb.ChatMessage(role="user", content="a")] * (MAX_CHAT_MESSAGES + 1)
            )
        ),
        "chat.messages",
    ),
    "10,000 stop strings": (request_for(stop=[f"s{i}" for i in range(10_000)]), "sampling.stop"),
    "empty stop string": (request_for(stop=[""]), "sampling.stop[0]"),
    "unknown stop id": (request_for(stop_token_ids=[UNKNOWN]), "sampling.stop_token_ids[0]"),
    "n 0": (changed(lambda r: setattr(r, "n", 0)), "n"),
    "n 17": (changed(lambda r: setattr(r, "n", 17)), "n"),
    "logprobs 21": (request_for(logprobs=21), "sampling.logprobs"),
    "33 drafts": (
        changed(lambda r: setattr(r.speculation, "num_draft_tokens", 33)),
        "speculation.num_draft_tokens",
    ),
    "min_acceptance above 1": (
        changed(lambda r: setattr(r.speculation, "min_acceptance", 1.5)),
        "speculation.min_acceptance",
    ),
    "NaN min_acceptance": (
        changed(lambda r: setattr(r.speculation, "min_acceptance", math.nan)),
        "speculation.min_acceptance",
    ),
    "traffic class of 65 characters": (
        changed(lambda r: setattr(r.speculation, "traffic_class", "x" * 65)),
        "speculation.traffic_class",
    ),
    "traffic class that can't be printed": (
        changed(lambda r: setattr(r.speculation, "traffic_class", "a\nb")),
        "speculation.traffic_class",
    ),
    "unknown tier": (changed(lambda r: setattr(r.speculation, "tier", 9)), "speculation.tier"),
    "unknown method": (changed(lambda r: setattr(r.speculation, "method", 77)), "speculation.method"),
    "block with a seed": (
        changed(lambda r: (setattr(r.sampling, "seed", 1), setattr(r.speculation, "method", 3))),
        "sampling.seed",
    ),
    "rejection at temperature 0": (
        changed(lambda r: (setattr(r.sampling, "temperature", 0), setattr(r.speculation, "method", 2))),
        "speculation.method",
    ),
}


async def check_nothing_started(services: Services, num_steps: int) -> None:
    assert services.target.num_steps == num_steps
    assert (await services.router.status()).num_requests == 0
    await services.all_is_free()


@pytest.mark.parametrize("kind", REFUSED)
async def test_bad_input_is_refused_by_field_and_nothing_is_started(services: Services, kind: str) -> None:
    request, field = REFUSED[kind]
    num_steps = services.target.num_steps
    error = await refusal(services.router.call(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    told = error_from_rpc(error)
    assert isinstance(told, InvalidArgumentError)
    beyond = "one less than the context" in told.message and "tokens" in told.message
    assert told.reason is (Reason.CONTEXT_EXCEEDED if beyond else Reason.INVALID_ARGUMENT)
    assert [violation.field for violation in told.violations] == [field]
    await check_nothing_started(services, num_steps)


@pytest.mark.parametrize(
    ("data", "field"), [(b"\x0a\x02\xc3\x28", "text"), (b"\x22\x04\x6a\x02\xff\xfe", "sampling.stop")]
)
async def test_invalid_utf8_is_the_clients_error(services: Services, data: bytes, field: str) -> None:
    num_steps = services.target.num_steps
    call = services.router.channel.unary_stream("/specdecode.v1.RouterService/Generate")(
        data, timeout=DEADLINE
    )
    error = error_from_rpc(await refusal(call))
    assert isinstance(error, InvalidArgumentError)
    assert [violation.field for violation in error.violations] == [field]
    await check_nothing_started(services, num_steps)


@pytest.mark.parametrize("method", ["GetStatus", "GetFigures", "GetPolicy", "SetPolicy"])
async def test_bytes_that_are_no_request_are_the_clients_error(services: Services, method: str) -> None:
    call = services.router.channel.unary_unary(f"/specdecode.v1.RouterService/{method}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\xff\xff", timeout=DEADLINE)
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidArgumentError)
    assert [violation.field for violation in error.violations] == ["request"]


async def test_a_message_above_the_limit_is_refused(services: Services) -> None:
    error = await refusal(services.router.call(request_for("a" * (17 * 2**20))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_unknown_model_is_not_found_and_a_known_one_is(services: Services) -> None:
    request = request_for(max_tokens=1)
    request.model = "another"
    error = error_from_rpc(await refusal(services.router.call(request)))
    assert isinstance(error, NotFoundError)
    assert error.reason is Reason.MODEL_NOT_FOUND
    assert services.target.replica.info.name in error.message
    request.model = services.target.replica.info.name
    assert len((await services.generate_one(request)).ids) == 1


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_max_tokens_that_just_fit_are_served(services: Services, max_tokens: int) -> None:
    prompt = [5] * (256 - max_tokens)
    answer = await services.generate_one(request_for(prompt, max_tokens=max_tokens, ignore_eos=True))
    assert len(answer.ids) == max_tokens


@pytest.mark.parametrize("num_banned", [1, 40_000])
async def test_large_requests_are_parsed_beside_the_event_loop(
    services: Services, monkeypatch: pytest.MonkeyPatch, num_banned: int
) -> None:
    threads: list[int] = []

    def noted(message_type: Any, data: bytes) -> Any:
        threads.append(threading.get_ident())
        return parse_request(message_type, data)

    monkeypatch.setattr(front, "parse_request", noted)
    request = request_for(max_tokens=1)
    request.sampling.banned_token_ids.extend([5] * num_banned)
    assert len((await services.generate_one(request)).ids) == 1
    assert (threads[0] == threading.get_ident()) == (num_banned == 1)
