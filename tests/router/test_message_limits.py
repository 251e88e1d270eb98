"""What is too large for one message travels in several; what can't travel at all harms nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.replicas import Listener, TargetLink
from specdecode.errors import InvalidArgumentError
from specdecode.tokenizer import fingerprint, load_tokenizer
from specdecode.types import DecodeFrame, Lease, Method, OpenSequence, SamplingParams, StepFrame
from specdecode.wire import decode_frame_to_proto, messages_within
from tests.router.client import MODEL, NGRAM, request_for, speculating
from tests.services import DEADLINE, Services, start_target

SMALLEST = 64 * 1024


def wordy(num_choices: int, drafter: int) -> Any:
    """Choices whose orders to open them take more than 4 KiB each."""
    request = speculating(request_for([300] * 230, seed=3, max_tokens=20, logprobs=20), 4, drafter)
    for token_id in range(300):
        request.sampling.logit_bias.add(token_id=token_id, bias=0.01)
    request.sampling.banned_token_ids.extend(range(250, 350))
    request.sampling.allowed_token_ids.ids.extend(range(350))
    request.n = num_choices
    return request


@pytest.mark.parametrize("drafter", [NGRAM, MODEL])
async def test_orders_that_exceed_a_message_together_are_sent_in_several(
    model: Path, other_model: Path, drafter: int
) -> None:
    limit = {"max_message_bytes": SMALLEST}
    request = wordy(16, drafter)
    async with Services.started(model, other_model) as services:
        undisturbed = [answer.ids for answer in await services.generate(request)]
    async with Services.started(model, other_model, target=limit, draft=limit, **limit) as services:
        answers = await asyncio.wait_for(services.generate(request), DEADLINE)
        assert [answer.ids for answer in answers] == undisturbed
        assert {answer.usage.num_failovers for answer in answers if answer.usage} == {0}
        await services.all_is_free()


def opening(sequence: int, num_tokens: int) -> OpenSequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    return OpenSequence(sequence, (5,) * num_tokens, num_tokens, sampling, Method.GREEDY)


async def test_an_order_that_no_message_holds_fails_alone(model: Path) -> None:
    target = await start_target(model)
    heard: dict[int, Any] = {}
    up, ended = asyncio.Event(), asyncio.Event()

    def hear(frame: StepFrame) -> None:
        for result in frame.results:
            # What follows an end is about orders for a sequence that the target never heard of.
            if result.sequence not in heard or not heard[result.sequence].ended:
                heard[result.sequence] = result
        if {1, 2} <= {sequence for sequence, result in heard.items() if result.ended}:
            ended.set()

    listener = Listener(up.set, hear, lambda: None)
    link = TargetLink(target.address, 600, fingerprint(load_tokenizer(model)), listener)
    running = asyncio.create_task(link.run())
    try:
        await asyncio.wait_for(up.wait(), DEADLINE)
        link.send(DecodeFrame((opening(1, 3), opening(2, 1000)), leases=(Lease(1, 3, 4), Lease(2, 1000, 4))))
        await asyncio.wait_for(ended.wait(), DEADLINE)
        assert link.epoch == 1
        assert heard[1].error is None
        assert isinstance(heard[2].error, InvalidArgumentError)
        assert "at most 600" in heard[2].error.message
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await target.stop()


def test_parts_hold_every_order_once_and_in_order() -> None:
    frame = DecodeFrame(
        tuple(opening(n, 40) for n in range(7)), (), tuple(Lease(n, 40, 4) for n in range(7)), (11, 12)
    )
    parts = list(messages_within(200, frame, decode_frame_to_proto))
    assert all(message.ByteSize() <= 200 for _, message in parts)
    assert len(parts) > 1
    orders = [order for part, _ in parts for order in (*part.opens, *part.leases, *part.closes)]
    assert orders == [*frame.opens, *frame.leases, *frame.closes]
