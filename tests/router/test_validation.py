from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from typing import Any

import pytest

from router.parsing import parse_request
from router.text import Tokenizer
from router.validation import ModelLimits, ResolvedRequest, resolve
from specdecode.errors import InvalidArgumentError
from specdecode.requests import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    SamplingOptions,
    SpeculationMode,
    SpeculationOptions,
    TextPrompt,
    Tier,
    TokenPrompt,
)
from specdecode.types import DrafterKind, Method, SamplingParams
from specdecode.v1 import router_service_pb2 as pb
from specdecode.wire import generate_request_from_proto
from tests.router import tiny
from tests.services import DEADLINE

MAX_LENGTH = 64


async def resolved(tokenizer: Tokenizer, **fields: Any) -> ResolvedRequest:
    """A request with these sampling options (or whole fields of the request) resolved for a tiny model."""
    own = {field.name for field in dataclasses.fields(GenerateRequest)}
    whole = {name: value for name, value in fields.items() if name in own}
    options = {name: value for name, value in fields.items() if name not in own}
    whole = {"prompt": TextPrompt("the fox"), "sampling": SamplingOptions(**options)} | whole
    limits = ModelLimits(tokenizer.vocab_size, MAX_LENGTH, max_prompt_bytes=4096)
    return await resolve(GenerateRequest(**whole), tokenizer, limits)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "sampling.temperature"),
    ({"temperature": math.nan}, "sampling.temperature"),
    ({"temperature": math.inf}, "sampling.temperature"),
    ({"temperature": 2.1}, "sampling.temperature"),
    ({"temperature": 1e-9}, "sampling.temperature"),
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"top_p": 1.01}, "sampling.top_p"),
    ({"top_p": math.nan}, "sampling.top_p"),
    ({"top_k": -1}, "sampling.top_k"),
    ({"min_p": -0.1}, "sampling.min_p"),
    ({"min_p": 1.1}, "sampling.min_p"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
    ({"repetition_penalty": 2.1}, "sampling.repetition_penalty"),
    ({"presence_penalty": 2.1}, "sampling.presence_penalty"),
    ({"frequency_penalty": math.nan}, "sampling.frequency_penalty"),
    ({"logit_bias": ((10**6, 1.0),)}, "sampling.logit_bias[0]"),
    ({"logit_bias": ((5, 1.0), (5, 2.0))}, "sampling.logit_bias"),
    ({"logit_bias": ((5, math.nan),)}, "sampling.logit_bias[0].bias"),
    ({"logit_bias": ((5, 101.0),)}, "sampling.logit_bias[0].bias"),
    ({"logit_bias": tuple((i, 1.0) for i in range(301))}, "sampling.logit_bias"),
    ({"allowed_token_ids": ()}, "sampling.allowed_token_ids"),
    ({"allowed_token_ids": (7, 10**6)}, "sampling.allowed_token_ids[1]"),
    ({"allowed_token_ids": (7,), "banned_token_ids": (7,)}, "sampling.allowed_token_ids"),
    ({"allowed_token_ids": (tiny.EOS,), "min_tokens": 1}, "sampling.allowed_token_ids"),
    ({"banned_token_ids": (10**6,)}, "sampling.banned_token_ids[0]"),
    ({"max_tokens": 0}, "sampling.max_tokens"),
    ({"max_tokens": MAX_LENGTH}, "sampling.max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens"),
    ({"stop": ("",)}, "sampling.stop[0]"),
    ({"stop": ("x" * 257,)}, "sampling.stop[0]"),
    ({"stop": tuple(map(str, range(10_000)))}, "sampling.stop"),
    ({"stop_token_ids": (10**6,)}, "sampling.stop_token_ids[0]"),
    ({"stop_token_ids": tuple(range(65))}, "sampling.stop_token_ids"),
    ({"logprobs": 21}, "sampling.logprobs"),
    ({"seed": -1}, "sampling.seed"),
    ({"seed": 2**64}, "sampling.seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"cache_salt": b"x" * 257}, "cache_salt"),
    ({"speculation": SpeculationOptions(num_draft_tokens=33)}, "speculation.num_draft_tokens"),
    ({"speculation": SpeculationOptions(method=Method.GREEDY)}, "speculation.method"),
    ({"prompt": None}, "prompt"),
    ({"prompt": TextPrompt("")}, "text"),
    ({"prompt": ChatPrompt(())}, "chat"),
    ({"prompt": ChatPrompt((ChatMessage("robot", "hello"),))}, "chat"),
    ({"prompt": TokenPrompt(())}, "token_ids"),
    ({"prompt": TokenPrompt((1, 10**6))}, "token_ids.ids[1]"),
    ({"prompt": TokenPrompt((5,) * MAX_LENGTH)}, "token_ids"),
    ({"prompt": TextPrompt("q" * MAX_LENGTH)}, "text"),
    ({"prompt": TextPrompt("x" * 4097)}, "text"),
]


@pytest.mark.parametrize(("fields", "field"), BAD_OPTIONS, ids=lambda value: str(value)[:50])
async def test_what_is_outside_its_range_is_refused_by_name(
    byte_level: Tokenizer, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await resolved(byte_level, **fields)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.violations[0].description in str(caught.value)


@dataclasses.dataclass(frozen=True)
class Awaited(ModelLimits):
    """Limits that are told only once the event loop went on."""

    went_on: threading.Event = dataclasses.field(default_factory=threading.Event)

    def __getattribute__(self, name: str) -> Any:
        if name == "max_length":
            assert object.__getattribute__(self, "went_on").wait(DEADLINE), "the event loop stood still"
        return object.__getattribute__(self, name)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": TextPrompt("the fox " * 1000)},
        {"prompt": ChatPrompt((ChatMessage("user", "the fox"),) * 5000)},
        {"prompt": TokenPrompt((5,) * 5000)},
        {"prompt": TextPrompt("the fox"), "sampling": SamplingOptions(banned_token_ids=(5,) * 5000)},
    ],
    ids=["text", "chat", "ids", "banned"],
)
async def test_the_event_loop_goes_on_while_a_large_request_is_resolved(
    byte_level: Tokenizer, fields: dict[str, Any]
) -> None:
    limits = Awaited(byte_level.vocab_size, 10**6, max_prompt_bytes=10**6)
    asyncio.get_running_loop().call_soon(limits.went_on.set)
    resolved = await resolve(GenerateRequest(**fields), byte_level, limits)
    assert resolved.prompt_token_ids


async def test_everything_that_is_wrong_with_the_options_is_said_at_once(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await resolved(byte_level, temperature=-1.0, top_p=0.0, n=0)
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {"sampling.temperature", "sampling.top_p", "n"}


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
async def test_a_seed_is_refused_where_equal_seeds_would_not_give_equal_text(
    byte_level: Tokenizer, method: Method
) -> None:
    with pytest.raises(InvalidArgumentError, match="seed"):
        await resolved(byte_level, seed=1, speculation=SpeculationOptions(method=method))


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK, Method.COUPLED])
async def test_temperature_0_is_greedy_or_refused(byte_level: Tokenizer, method: Method) -> None:
    assert (await resolved(byte_level, temperature=0.0, seed=3)).method is Method.GREEDY
    explicit = SpeculationOptions(method=Method.GREEDY)
    assert (await resolved(byte_level, temperature=0.0, speculation=explicit)).method is Method.GREEDY
    with pytest.raises(InvalidArgumentError, match=r"speculation\.method"):
        await resolved(byte_level, temperature=0.0, speculation=SpeculationOptions(method=method))


async def test_a_seed_selects_coupled_and_coupled_draws_a_seed(byte_level: Tokenizer) -> None:
    seeded = await resolved(byte_level, seed=2**64 - 1)
    assert (seeded.method, seeded.seed) == (Method.COUPLED, 2**64 - 1)
    assert (await resolved(byte_level)).method is Method.REJECTION
    coupled = SpeculationOptions(method=Method.COUPLED)
    drawn = [(await resolved(byte_level, speculation=coupled)).seed for _ in range(2)]
    assert drawn[0] != drawn[1]


async def test_max_tokens_fills_the_room_unless_given(byte_level: Tokenizer) -> None:
    one_below = TokenPrompt((5,) * (MAX_LENGTH - 1))
    assert (await resolved(byte_level, prompt=one_below)).sampling.max_tokens == 1
    assert (await resolved(byte_level, prompt=TokenPrompt((5,)))).sampling.max_tokens == MAX_LENGTH - 1
    whole_room = await resolved(byte_level, prompt=TokenPrompt((5,)), max_tokens=MAX_LENGTH - 1)
    assert whole_room.sampling.max_tokens == MAX_LENGTH - 1


async def test_defaults_are_those_of_the_proto(byte_level: Tokenizer) -> None:
    request = await resolved(byte_level, max_tokens=3)
    assert request.sampling == SamplingParams(max_tokens=3, stop_token_ids=(tiny.EOS,))
    assert (request.n, request.mode, request.tier) == (1, SpeculationMode.AUTO, Tier.INTERACTIVE)
    assert (request.num_draft_tokens, request.drafter, request.min_acceptance) == (None, None, None)


async def test_options_reach_the_resolved_request(byte_level: Tokenizer) -> None:
    speculation = SpeculationOptions(
        SpeculationMode.OFF, 7, DrafterKind.MODEL, min_acceptance=0.25, tier=Tier.BATCH, traffic_class="code"
    )
    request = await resolved(
        byte_level,
        temperature=0.5,
        top_k=5,
        logit_bias=((9, 1.0), (3, -1.0)),
        allowed_token_ids=(9, 3, 3),
        ignore_eos=True,
        stop_token_ids=(8, 7),
        stop=("a", "a", "b"),
        logprobs=0,
        max_tokens=2,
        speculation=speculation,
    )
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_k=5,
        logit_bias=((3, -1.0), (9, 1.0)),
        allowed_token_ids=(3, 9),
        stop_token_ids=(7, 8),
        logprobs=0,
        max_tokens=2,
    )
    assert request.stops == ("a", "b")
    assert (request.mode, request.num_draft_tokens) == (SpeculationMode.OFF, 7)
    assert (request.drafter, request.min_acceptance) == (DrafterKind.MODEL, 0.25)
    assert (request.tier, request.traffic_class) == (Tier.BATCH, "code")


async def test_top_k_of_the_whole_vocabulary_is_off(byte_level: Tokenizer) -> None:
    assert (await resolved(byte_level, top_k=byte_level.vocab_size)).sampling.top_k == 0
    assert (await resolved(byte_level, top_k=2**32 - 1)).sampling.top_k == 0


def test_every_field_of_the_request_crosses_the_edge() -> None:
    message = pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")]),
        sampling=pb.SamplingOptions(
            temperature=0.5,
            top_k=2,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            banned_token_ids=[4],
            max_tokens=5,
            min_tokens=2,
            stop=["x"],
            stop_token_ids=[6],
            ignore_eos=True,
            logprobs=0,
            seed=0,
        ),
        n=2,
        model="m",
        include_rounds=True,
        cache_salt=b"s",
    )
    message.sampling.logit_bias.add(token_id=3, bias=0.5)
    message.sampling.allowed_token_ids.ids.extend([1, 2])
    message.speculation.mode = pb.SPECULATION_MODE_ON
    message.speculation.num_draft_tokens = 0
    message.speculation.drafter = 1
    message.speculation.method = 3
    assert generate_request_from_proto(message) == GenerateRequest(
        prompt=ChatPrompt((ChatMessage("user", "hi"),)),
        sampling=SamplingOptions(
            temperature=0.5,
            top_k=2,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias=((3, 0.5),),
            allowed_token_ids=(1, 2),
            banned_token_ids=(4,),
            max_tokens=5,
            min_tokens=2,
            stop=("x",),
            stop_token_ids=(6,),
            ignore_eos=True,
            logprobs=0,
            seed=0,
        ),
        speculation=SpeculationOptions(SpeculationMode.ON, 0, DrafterKind.NGRAM, Method.BLOCK),
        n=2,
        model="m",
        include_rounds=True,
        cache_salt=b"s",
    )


def test_absent_fields_stay_absent() -> None:
    assert generate_request_from_proto(pb.GenerateRequest()) == GenerateRequest(prompt=None)


@pytest.mark.parametrize("field", ["mode", "drafter", "method"])
def test_unknown_enum_values_are_refused_by_name(field: str) -> None:
    message = pb.GenerateRequest()
    setattr(message.speculation, field, 99)
    with pytest.raises(InvalidArgumentError, match=rf"speculation\.{field}"):
        generate_request_from_proto(message)


def embedded(field_number: int, data: bytes) -> bytes:
    """A length-delimited field on the wire."""
    return bytes([field_number << 3 | 2, len(data)]) + data


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (embedded(1, b"ok \xff"), "text"),
        (embedded(2, embedded(1, embedded(2, b"\xc3"))), "chat.messages.content"),
        (embedded(4, embedded(13, b"\xed\xa0\x80")), "sampling.stop"),
        (embedded(7, b"\x80"), "model"),
        (b"\x0a\x20abc", "request"),
    ],
)
def test_bytes_that_are_no_request_are_refused_by_field(data: bytes, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_request(pb.GenerateRequest, data)
    assert caught.value.violations[0].field == field


def test_bytes_of_a_request_are_parsed() -> None:
    message = pb.GenerateRequest(text="caf\u00e9")
    assert parse_request(pb.GenerateRequest, message.SerializeToString()) == message
