"""A replica may be lost at any moment of a sequence's life: the text that comes is the undisturbed one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode.errors import Reason
from specdecode.wire import piece_from_proto
from target_service.engine import StepOutcome
from target_service.sequence import TargetSequence
from tests.router.client import MODEL, NGRAM, PROMPT, request_for, speculating
from tests.services import DEADLINE, Answer, Services, Target, eventually

MAX_TOKENS = 120
LONG_PROMPT = (PROMPT + " ") * 12


class Held:
    """A target whose engine stands still before the first step in which something holds of a sequence."""

    def __init__(self, target: Target, holds: Callable[[TargetSequence], bool]) -> None:
        self.reached, self._released = threading.Event(), threading.Event()
        engine = target.replica.engine
        step = engine.step

        def held() -> StepOutcome:
            if not self._released.is_set() and any(map(holds, engine.sequences.values())):
                self.reached.set()
                self._released.wait(DEADLINE)
            return step()

        engine.step = held  # type: ignore[method-assign]

    def release(self) -> None:
        """Lets it go on, for good: what it computes then comes too late."""
        self._released.set()


def prefills(sequence: TargetSequence) -> bool:
    return sequence.kv.kv_len > 0 and len(sequence.kv.missing) > 1


def verifies(sequence: TargetSequence) -> bool:
    return sequence.verify is not None and sequence.num_output > 10


def leased(sequence: TargetSequence) -> bool:
    return sequence.lease_left > 0 and sequence.num_output > 10


async def answer_to(services: Services, request: Any, answer: Answer) -> Answer:
    async for message in services.router.call(request):
        answer.hear(piece_from_proto(message))
    return answer


MOMENTS = [
    pytest.param(prefills, 0, id="prefill"),
    pytest.param(verifies, 4, id="verification"),
    pytest.param(leased, 0, id="lease"),
]
SAMPLINGS = [
    pytest.param({"temperature": 0}, id="greedy"),
    pytest.param({"seed": 11, "presence_penalty": 0.3}, id="seeded"),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("holds", "num_draft_tokens"), MOMENTS)
async def test_a_replica_lost_in_the_middle_of_a_step_costs_no_token(
    model: Path,
    holds: Callable[[TargetSequence], bool],
    num_draft_tokens: int,
    sampling: dict[str, Any],
) -> None:
    request = request_for(LONG_PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, **sampling)
    request = speculating(request, num_draft_tokens, NGRAM)
    settings = {"prefill_chunk": 16, "prefix_cache": False}
    async with Services.started(model, num_targets=2, target=settings) as services:
        undisturbed = await services.generate_one(request)
        held = [Held(target, holds) for target in services.targets]
        answering = asyncio.create_task(answer_to(services, request, Answer()))
        await eventually(lambda: any(hold.reached.is_set() for hold in held), "the moment has come")
        (home,) = [index for index, hold in enumerate(held) if hold.reached.is_set()]
        held[1 - home].release()
        lost = services.targets[home]
        await lost.server.drain(None)
        answer = await answering
        held[home].release()
        await lost.stop()
        assert (answer.ids, answer.text) == (undisturbed.ids, undisturbed.text)
        assert answer.usage is not None
        assert answer.usage.num_failovers == 1
        (move,) = answer.pieces[-1].moves
        assert (move.address, move.reason) == (lost.address, Reason.REPLICA_LOST)
        assert move.num_emitted < MAX_TOKENS
        await services.targets[1 - home].all_is_free()


async def test_a_replica_lost_while_it_drains_costs_no_token(model: Path) -> None:
    request = request_for(seed=1, max_tokens=200, ignore_eos=True)
    async with Services.started(model, num_targets=2) as services:
        undisturbed = await services.generate_one(request)
        answer = Answer()
        answering = asyncio.create_task(answer_to(services, request, answer))
        await eventually(lambda: len(answer.ids) >= 10, "some text has come")
        (target,) = [entry for entry in services.targets if entry.num_sequences]
        draining = asyncio.create_task(target.server.drain(DEADLINE))
        await target.server.draining.wait()
        await target.server.grpc.stop(None)
        assert (await answering).ids == undisturbed.ids
        assert answer.usage is not None
        assert answer.usage.num_failovers == 1
        await draining
        await asyncio.to_thread(target.loop.stop)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_two_losses_in_a_row_and_of_all_replicas_cost_no_token(
    model: Path, other_model: Path, sampling: dict[str, Any]
) -> None:
    request = speculating(request_for(max_tokens=220, ignore_eos=True, **sampling), 3, MODEL)
    async with Services.started(model, other_model, num_targets=2) as services:
        undisturbed = await services.generate_one(request)
        answer = Answer()
        answering = asyncio.create_task(answer_to(services, request, answer))

        def homes() -> list[int]:
            running = (not t.server.draining.is_set() and t.num_sequences > 0 for t in services.targets)
            return [index for index, runs in enumerate(running) if runs]

        async def lose_home_after(num_tokens: int) -> int:
            await eventually(lambda: len(answer.ids) >= num_tokens, f"{num_tokens} tokens have come")
            await eventually(lambda: len(homes()) == 1, "it runs somewhere")
            (index,) = homes()
            await services.targets[index].stop()
            return index

        first = await lose_home_after(10)
        second = await lose_home_after(len(answer.ids) + 10)
        assert first != second  # all are gone now
        await services.restart_target(first)
        heard = await answering
        assert heard.ids == undisturbed.ids
        assert heard.usage is not None
        assert heard.usage.num_failovers == 2
        moves = heard.pieces[-1].moves
        assert [move.address for move in moves] == [services.targets[i].address for i in (first, second)]
        await services.targets[first].all_is_free()
