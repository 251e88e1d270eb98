"""Who waits, in which order, for how long, and who is refused at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.access import Caller
from router.admission import Admission, Ticket
from router.metering import Meter
from specdecode.errors import DeadlineExceededError, Reason, ResourceExhaustedError
from specdecode.keys import KeyLimits
from specdecode.requests import Tier
from specdecode.serving import error_from_rpc
from specdecode.types import Draft
from tests.router.client import NGRAM, request_for, speculating
from tests.router.scripted import Ask, scripted_drafts
from tests.services import DEADLINE, Services, eventually, refusal


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(
    capacity: int = 1, max_waiting_tokens: int = 1000, clock: Callable[[], float] = time.time
) -> Admission:
    return Admission(lambda: capacity, max_waiting_tokens, lambda: 0.5, clock, clock)


def ticket(
    tenant: str = "a",
    tier: Tier = Tier.INTERACTIVE,
    tokens: int = 10,
    choices: int = 1,
    weight: float = 1.0,
    deadline: float | None = None,
) -> Ticket:
    return Ticket(Caller(tenant, tenant, weight), tier, choices, tokens, deadline)


class Running:
    """A request in a task of its own, which holds its turn until it is told to end."""

    def __init__(self, admission: Admission, own: Ticket, output: int = 0) -> None:
        self.ticket = own
        self.began = asyncio.Event()
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission, output))

    async def _run(self, admission: Admission, output: int) -> None:
        async with admission.turn(self.ticket):
            admission.used(self.ticket, output)
            self.began.set()
            await self.end.wait()


async def settled() -> None:
    """Lets every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def order_of(admission: Admission, tickets: list[Ticket], output: int = 10) -> list[Ticket]:
    """In which order requests that all wait have their turns, one after another."""
    first = Running(admission, ticket("somebody"))
    await settled()
    waiting = [Running(admission, own, output) for own in tickets]
    await settled()
    order, running = [], first
    while waiting:
        running.end.set()
        await settled()
        (running,) = [entry for entry in waiting if entry.began.is_set()]
        waiting.remove(running)
        order.append(running.ticket)
    running.end.set()
    await settled()
    assert admission.num_waiting == 0
    return order


class TestTurns:
    async def test_nobody_waits_while_there_is_room(self) -> None:
        admission = make(capacity=3)
        running = [Running(admission, ticket()) for _ in range(3)]
        await settled()
        assert all(entry.began.is_set() for entry in running)
        fourth = Running(admission, ticket())
        await settled()
        assert not fourth.began.is_set()
        running[0].end.set()
        await asyncio.wait_for(fourth.began.wait(), DEADLINE)

    async def test_a_request_of_more_choices_than_there_is_room_for_runs_alone(self) -> None:
        admission = make(capacity=2)
        large = Running(admission, ticket(choices=5))
        await settled()
        assert large.began.is_set()
        small = Running(admission, ticket())
        await settled()
        assert not small.began.is_set()
        large.end.set()
        await asyncio.wait_for(small.began.wait(), DEADLINE)

    async def test_small_requests_do_not_overtake_a_large_one_for_ever(self) -> None:
        admission = make(capacity=2)
        one, two = Running(admission, ticket()), Running(admission, ticket())
        await settled()
        large, small = Running(admission, ticket(choices=2)), Running(admission, ticket())
        await settled()
        one.end.set()
        await settled()
        assert not small.began.is_set()
        two.end.set()
        await asyncio.wait_for(large.began.wait(), DEADLINE)

    async def test_one_tenant_is_served_in_order(self) -> None:
        tickets = [ticket() for _ in range(5)]
        assert await order_of(make(), tickets) == tickets

    async def test_a_tenant_with_many_requests_does_not_delay_one_with_few(self) -> None:
        many, few = [ticket("many") for _ in range(20)], [ticket("few") for _ in range(2)]
        order = await order_of(make(), [*many, *few])
        assert max(order.index(entry) for entry in few) <= 4

    async def test_turns_go_by_tokens_not_by_requests(self) -> None:
        large, small = (
            [ticket("large", tokens=100) for _ in range(6)],
            [ticket("small", tokens=10) for _ in range(30)],
        )
        order = await order_of(make(max_waiting_tokens=10**6), [*large, *small], output=0)
        served = {"large": 0, "small": 0}
        for entry in order[:22]:
            served[entry.caller.tenant] += entry.num_prompt_tokens
        assert abs(served["large"] - served["small"]) <= 100

    async def test_weights_share_the_tokens(self) -> None:
        heavy = [ticket("heavy", weight=3.0) for _ in range(30)]
        light = [ticket("light") for _ in range(30)]
        order = await order_of(make(), [*light, *heavy])
        first = [entry.caller.tenant for entry in order[:20]]
        assert 13 <= first.count("heavy") <= 17

    async def test_batch_gets_its_weight_and_never_nothing(self) -> None:
        batch = [ticket(tier=Tier.BATCH) for _ in range(20)]
        interactive = [ticket() for _ in range(20)]
        order = await order_of(make(), [*batch, *interactive])
        first = [entry.tier for entry in order[:15]]
        assert 4 <= first.count(Tier.BATCH) <= 6

    async def test_nobody_saves_up_turns_while_away(self) -> None:
        admission = make(capacity=1)
        busy = Running(admission, ticket("busy"), output=10_000)
        await settled()
        waiting = [Running(admission, ticket("busy"), 100) for _ in range(4)]
        await settled()
        back = [Running(admission, ticket("back"), 100) for _ in range(4)]
        await settled()
        busy.end.set()
        await settled()
        turns = []
        for _ in range(8):
            (running,) = [e for e in (*waiting, *back) if e.began.is_set() and not e.end.is_set()]
            turns.append(running.ticket.caller.tenant)
            running.end.set()
            await settled()
        assert turns[:4].count("back") <= 3


class TestQueue:
    async def test_too_many_waiting_tokens_are_refused_with_a_time_to_come_back(self) -> None:
        clock = Clock()
        admission = make(max_waiting_tokens=25, clock=clock)
        for _ in range(4):  # one ends each half second
            running = Running(admission, ticket())
            await settled()
            clock.now += 0.5
            running.end.set()
            await settled()
        held, first, second = (Running(admission, ticket()) for _ in range(3))
        await settled()
        with pytest.raises(ResourceExhaustedError) as caught:
            async with admission.turn(ticket()):
                pass
        assert caught.value.reason is Reason.QUEUE_FULL
        assert caught.value.retry_after == pytest.approx(3 * 1.5 / 4, rel=0.5)
        for entry in (held, first, second):
            entry.end.set()
        await settled()

    async def test_a_turn_after_the_deadline_is_refused_at_once(self) -> None:
        clock = Clock()
        admission = make(clock=clock)
        for _ in range(3):
            running = Running(admission, ticket())
            await settled()
            clock.now += 10.0
            running.end.set()
            await settled()
        held = Running(admission, ticket())
        await settled()
        with pytest.raises(ResourceExhaustedError) as caught:
            async with admission.turn(ticket(deadline=clock.now + 1.0)):
                pass
        assert caught.value.reason is Reason.DEADLINE_TOO_SOON
        assert caught.value.retry_after is not None
        assert caught.value.retry_after > 1.0
        patient = Running(admission, ticket(deadline=clock.now + 100.0))
        await settled()
        assert admission.num_waiting == 1
        held.end.set()
        await asyncio.wait_for(patient.began.wait(), DEADLINE)

    async def test_whose_deadline_passes_leaves_the_queue(self) -> None:
        admission = make()
        held = Running(admission, ticket())
        await settled()
        with pytest.raises(DeadlineExceededError):
            async with admission.turn(ticket(deadline=time.time() + 0.05)):
                pass
        assert admission.num_waiting == 0
        held.end.set()
        await settled()

    async def test_whoever_gives_up_leaves_no_place_taken(self) -> None:
        admission = make()
        held = Running(admission, ticket())
        await settled()
        waiting = [Running(admission, ticket(str(number))) for number in range(6)]
        await settled()
        for entry in waiting[::2]:
            entry.task.cancel()
        held.end.set()  # a turn is given while some are being cancelled
        await settled()
        for _ in range(3):
            (running,) = [e for e in waiting[1::2] if e.began.is_set() and not e.end.is_set()]
            running.end.set()
            await settled()
        assert admission.num_waiting == 0
        last = Running(admission, ticket())
        await settled()
        assert last.began.is_set()

    async def test_more_room_wakes_who_waits(self) -> None:
        capacity = [1]
        admission = Admission(lambda: capacity[0], 1000, lambda: 0.5)
        _, second = Running(admission, ticket()), Running(admission, ticket())
        await settled()
        assert not second.began.is_set()
        capacity[0] = 2
        admission.wake()
        await asyncio.wait_for(second.began.wait(), DEADLINE)


class TestMeter:
    def test_a_rate_is_kept_on_average_and_a_minute_may_come_at_once(self) -> None:
        clock = Clock()
        meter = Meter(clock)
        caller = Caller("k", "a", limits=KeyLimits(requests_per_minute=60))
        begun = 0
        for _ in range(1200):
            with contextlib.suppress(ResourceExhaustedError), meter.counted(caller):
                begun += 1
            clock.now += 0.1
        assert 60 + 118 <= begun <= 60 + 121

    def test_the_time_told_is_the_time_it_takes(self) -> None:
        clock = Clock()
        meter = Meter(clock)
        caller = Caller("k", "a", limits=KeyLimits(tokens_per_minute=600))
        with meter.counted(caller):
            meter.used(caller, 700)
        with pytest.raises(ResourceExhaustedError) as caught:
            meter.check(caller)
        assert caught.value.retry_after is not None
        clock.now += caught.value.retry_after * 0.99
        with pytest.raises(ResourceExhaustedError):
            meter.check(caller)
        clock.now += caught.value.retry_after * 0.02
        meter.check(caller)

    def test_keys_do_not_use_up_one_another(self) -> None:
        meter = Meter(Clock())
        limits = KeyLimits(requests_per_minute=1)
        for key in ("k", "l"):
            with meter.counted(Caller(key, "a", limits=limits)):
                pass
            with pytest.raises(ResourceExhaustedError):
                meter.check(Caller(key, "a", limits=limits))


def never(ask: Ask) -> Draft | None:
    return None


@asynccontextmanager
async def full(model: Path, **settings: Any) -> AsyncIterator[tuple[Services, Any]]:
    """Services whose only slot is held by a request that waits for drafts that never come, and its call."""
    async with (
        scripted_drafts(never) as (service, address),
        Services.started(
            model, draft_address=address, draft_deadline_seconds=60.0, max_running=1, **settings
        ) as services,
    ):
        call = services.router.call(speculating(request_for(temperature=0, max_tokens=50), 4, NGRAM))
        async with asyncio.timeout(DEADLINE):
            await service.asked.wait()
        yield services, call
        call.cancel()
        await services.all_is_free()


class TestServices:
    async def test_what_waits_holds_nothing_on_a_target_and_goes_on_by_itself(self, model: Path) -> None:
        async with full(model) as (services, call):
            waiting = services.router.call(request_for(temperature=0, max_tokens=5))
            router: Any = services.router.running.on_stopped.__self__  # type: ignore[attr-defined]
            await eventually(lambda: router._admission.num_waiting == 1, "it waits")
            assert services.target.num_sequences == 1
            call.cancel()
            async with asyncio.timeout(DEADLINE):
                assert len([message async for message in waiting]) >= 1

    async def test_a_deadline_that_passes_while_waiting_ends_the_wait(self, model: Path) -> None:
        async with full(model) as (services, _):
            error = await refusal(services.router.call(request_for(max_tokens=5), timeout=0.3))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            router: Any = services.router.running.on_stopped.__self__  # type: ignore[attr-defined]
            await eventually(lambda: router._admission.num_waiting == 0, "nobody waits")

    async def test_more_requests_than_may_be_are_refused_fast_with_a_time(self, model: Path) -> None:
        async with full(model, max_requests=3) as (services, _):
            waiting = [services.router.call(request_for(max_tokens=5)) for _ in range(2)]
            router: Any = services.router.running.on_stopped.__self__  # type: ignore[attr-defined]
            await eventually(lambda: router._admission.num_waiting == 2, "both wait")
            took = []
            for _ in range(20):
                began = time.perf_counter()
                error = error_from_rpc(await refusal(services.router.call(request_for(max_tokens=5))))
                took.append(time.perf_counter() - began)
                assert isinstance(error, ResourceExhaustedError)
                assert error.retry_after is not None
            assert sorted(took)[10] < 0.05
            for call in waiting:
                call.cancel()

    @pytest.mark.parametrize(
        ("setting", "request_", "field"),
        [
            ({"max_prompt_tokens": 8}, request_for(list(range(20, 29))), "token_ids"),
            ({"max_output_tokens": 8}, request_for(max_tokens=9), "sampling.max_tokens"),
            ({"max_stops": 1}, request_for(stop=["a", "b"]), "sampling.stop"),
            ({"max_logprobs": 2}, request_for(logprobs=3), "sampling.logprobs"),
        ],
    )
    async def test_the_operators_limits_are_named(
        self, model: Path, setting: dict[str, int], request_: Any, field: str
    ) -> None:
        async with Services.started(model, **setting) as services:
            error = error_from_rpc(await refusal(services.router.call(request_)))
        assert [entry.field for entry in error.violations] == [field]

    async def test_the_operators_limit_on_choices_and_output_hold_where_nothing_is_asked(
        self, model: Path
    ) -> None:
        async with Services.started(model, max_choices=2, max_output_tokens=8) as services:
            request = request_for(temperature=0, ignore_eos=True)
            assert len((await services.generate_one(request)).tokens) == 8
            request.n = 3
            error = error_from_rpc(await refusal(services.router.call(request)))
        assert [entry.field for entry in error.violations] == ["n"]
