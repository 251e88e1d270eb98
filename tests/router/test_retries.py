"""Clients that try again: what was refused, in time, within the budget, and never what was heard of."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.text import Tokenizer
from specdecode.client import Completion, RouterClient
from specdecode.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    Reason,
    ResourceExhaustedError,
    SpecdecodeError,
    UnavailableError,
)
from specdecode.requests import GenerateRequest, PolicyOptions, SamplingOptions, TextPrompt
from specdecode.retries import Attempts, Retries, RetryBudget
from specdecode.sync_client import SyncRouterClient
from tests.router.client import PROMPT, greedy
from tests.router.test_clients import Gate, is_plain
from tests.services import DEADLINE, Services

GREEDY = GenerateRequest(TextPrompt(PROMPT), SamplingOptions(temperature=0, max_tokens=20))
FULL = ResourceExhaustedError("full", retry_after=1.0)


def generous(max_attempts: int = 100) -> Retries:
    return Retries(max_attempts, RetryBudget(1.0, 1000.0))


@pytest.mark.parametrize(
    ("error", "is_tried_again"),
    [
        (FULL, True),
        (UnavailableError("no"), True),
        (ResourceExhaustedError("never fits", reason=Reason.KV_TOO_SMALL), False),
        (InvalidArgumentError.of("n", "bad"), False),
        (DeadlineExceededError("late"), False),
        (InternalError("broken"), False),
    ],
    ids=str,
)
def test_what_waiting_helps_is_tried_again_and_nothing_else(
    error: SpecdecodeError, is_tried_again: bool
) -> None:
    assert (generous().pause(error, 1, None) is not None) == is_tried_again


def test_the_router_is_given_the_time_it_asks_for_and_more_each_time() -> None:
    pauses = [generous().pause(FULL, attempt, None) for attempt in range(1, 8)]
    for attempt, pause in enumerate(pauses):
        assert pause is not None
        assert min(2**attempt, 10) <= pause <= 1.25 * min(2**attempt, 10)


def test_nobody_waits_beyond_the_deadline_or_the_last_attempt() -> None:
    assert generous().pause(FULL, 1, seconds_left=0.9) is None
    assert Retries(2).pause(FULL, 1, seconds_left=5.0) is not None
    assert Retries(2).pause(FULL, 2, seconds_left=5.0) is None


def test_retries_stay_a_share_of_the_requests() -> None:
    budget = RetryBudget(share=0.25, reserve=2)
    assert [budget.take() for _ in range(4)] == [True, True, False, False]
    for _ in range(4):
        budget.request()
    assert [budget.take() for _ in range(2)] == [True, False]


def test_what_was_heard_of_is_not_asked_for_twice() -> None:
    attempts = Attempts(generous(), None)
    attempts.begin()
    attempts.heard()
    with pytest.raises(UnavailableError):
        attempts.pause_after(UnavailableError("lost"))


@pytest.mark.parametrize("values", [{"share": 1.5}, {"share": -1}, {"reserve": -1}])
def test_budgets_outside_their_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError):
        RetryBudget(**values)
    with pytest.raises(InvalidArgumentError):
        Retries(0)


@asynccontextmanager
async def full(model: Path) -> AsyncIterator[tuple[Services, Gate, asyncio.Task[Completion]]]:
    """Services whose only place is taken until the gate opens."""
    async with Services.started(model, max_requests=1) as services:
        gate = Gate(services.target, is_plain)
        async with await RouterClient.open(address_of(services)) as client:
            first = asyncio.create_task(complete(client, GREEDY))
            await gate.holds()
            yield services, gate, first
            gate.open()
            await first


def address_of(services: Services) -> str:
    return f"127.0.0.1:{services.router.running.server.port}"


async def complete(client: RouterClient, request: GenerateRequest) -> Completion:
    completion = Completion(0)
    async for piece in client.generate(request, timeout_seconds=DEADLINE):
        completion.add(piece)
    return completion


def complete_in_turn(client: SyncRouterClient, request: GenerateRequest) -> Completion:
    completion = Completion(0)
    for piece in client.generate(request, timeout_seconds=DEADLINE):
        completion.add(piece)
    return completion


class Told(RetryBudget):
    """A budget that opens a gate when it is drawn on."""

    gate: Gate

    def take(self) -> bool:
        self.gate.open()
        return super().take()


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
async def test_a_request_that_found_no_room_is_answered_when_there_is(model: Path, sync: bool) -> None:
    async with full(model) as (services, gate, first):
        budget = Told(1.0, 1000.0)
        budget.gate = gate
        retries = Retries(100, budget)
        if sync:
            with SyncRouterClient.open(address_of(services), retries=retries) as client:
                second = await asyncio.to_thread(complete_in_turn, client, GREEDY)
        else:
            async with await RouterClient.open(address_of(services), retries=retries) as client_:
                second = await complete(client_, GREEDY)
        assert second.token_ids == (await first).token_ids


async def test_without_retries_it_is_refused_at_once(model: Path) -> None:
    async with full(model) as (services, _, _), await RouterClient.open(address_of(services)) as client:
        with pytest.raises(ResourceExhaustedError):
            await complete(client, GREEDY)


async def test_the_blocking_client_does_what_the_other_does(model: Path, byte_level: Tokenizer) -> None:
    async with Services.started(model) as services:

        def use() -> None:
            with SyncRouterClient.open(address_of(services)) as client:
                completion = complete_in_turn(client, GREEDY)
                prompt = completion.usage.num_prompt_tokens
                assert prompt > 0
                status = client.get_status()
                assert status.targets[0].model is not None
                assert list(completion.token_ids) == greedy(model, byte_level.encode_text(PROMPT), 20)
                assert client.get_figures()[0].num_emitted == 20
                assert client.set_policy(PolicyOptions(enabled=False)).enabled is False
                assert client.get_policy().enabled is False
                with pytest.raises(InvalidArgumentError) as caught:
                    complete_in_turn(client, dataclasses.replace(GREEDY, n=17))
                assert caught.value.violations[0].field == "n"
                pieces = client.generate(
                    dataclasses.replace(GREEDY, sampling=SamplingOptions(max_tokens=200, ignore_eos=True))
                )
                next(pieces)
                pieces.close()

        await asyncio.to_thread(use)
        await services.all_is_free()


def test_nobody_there_is_told_in_time() -> None:
    with pytest.raises(UnavailableError, match="no router answers"):
        SyncRouterClient.open("127.0.0.1:1", connect_seconds=0.2)
