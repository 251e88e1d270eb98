"""What fails for one sequence ends that sequence alone; what fails once, nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specdecode.errors import Reason
from specdecode.lm.runner import Chunk
from specdecode.types import Lease, Method
from target_service import engine as engine_module
from target_service.engine import EngineFailedError
from tests.target.driver import Client, make_engine, opening
from tests.target.texts import GREEDY_TEXT, OTHER_PROMPT, OTHER_TEXT, PROMPT

LENGTH = 12


def failing(call: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """The same, raising when its arguments are those."""

    def wrapped(*args: Any) -> Any:
        if when(*args):
            raise RuntimeError("out of something")
        return call(*args)

    return wrapped


def two_sequences(**options: Any) -> Client:
    """A client with two sequences that have leases; 0 has `options`."""
    client = Client(make_engine())
    client.send(
        opening(0, PROMPT, max_tokens=LENGTH, **options),
        opening(1, OTHER_PROMPT, max_tokens=LENGTH),
        Lease(0, len(PROMPT), LENGTH),
        Lease(1, len(OTHER_PROMPT), LENGTH),
    )
    return client


def check_that_0_failed_alone(client: Client) -> None:
    error = client.results[0][-1].error
    assert error is not None
    assert error.reason is Reason.ENGINE_FAILED
    assert "something" not in error.message
    assert client.tokens(1) == OTHER_TEXT[:LENGTH]
    assert client.engine.lm.pool.num_free == client.engine.lm.pool.num_blocks


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_sequence_that_no_forward_can_take_ends_alone(after: int) -> None:
    client = two_sequences()
    lm: Any = client.engine.lm

    def poisoned(chunks: Sequence[Chunk]) -> bool:
        mine = (c for c in chunks if tuple(c.sequence.token_ids[: len(PROMPT)]) == tuple(PROMPT))
        return any(c.sequence.committed_length >= len(PROMPT) + after for c in mine)

    lm.forward = failing(lm.forward, poisoned)
    client.settle()
    assert client.tokens(0) == GREEDY_TEXT[:after]
    check_that_0_failed_alone(client)


def test_a_sequence_that_can_not_be_verified_ends_alone() -> None:
    client = two_sequences(temperature=1.0, method=Method.REJECTION)
    verifier: Any = client.engine._verifier
    verifier._noise = failing(verifier._noise, lambda shape: True)
    client.settle()
    check_that_0_failed_alone(client)


def test_a_sequence_whose_logprobs_fail_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = failing(engine_module.window_logprobs, lambda *args: True)
    monkeypatch.setattr(engine_module, "window_logprobs", wrapped)
    client = two_sequences(logprobs=1)
    client.settle()
    check_that_0_failed_alone(client)


def test_what_fails_once_changes_no_text() -> None:
    client = two_sequences()
    lm: Any = client.engine.lm
    verifier: Any = client.engine._verifier
    left = {"forward": 2, "verify": 2}

    def once(name: str) -> Callable[..., bool]:
        def due(*args: Any) -> bool:
            batched = len(args[-1]) > 1
            left[name] -= batched
            return batched and left[name] == 0

        return due

    lm.forward = failing(lm.forward, once("forward"))
    verifier.verify = failing(verifier.verify, once("verify"))
    client.settle()
    assert left["forward"] < 0
    assert left["verify"] < 0
    assert client.tokens(0) == GREEDY_TEXT[:LENGTH]
    assert client.tokens(1) == OTHER_TEXT[:LENGTH]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_end_their_sequence_alone(value: float) -> None:
    client = two_sequences()
    lm: Any = client.engine.lm
    forward = lm.forward

    def spoilt(chunks: Sequence[Chunk]) -> torch.Tensor:
        logits: torch.Tensor = forward(chunks).clone()
        row = 0
        for chunk in chunks:
            own = tuple(chunk.sequence.token_ids[: len(PROMPT)]) == tuple(PROMPT)
            if own and chunk.num_logits and chunk.sequence.committed_length > len(PROMPT) + 2:
                logits[row, 3] = value
            row += chunk.num_logits
        return logits

    lm.forward = spoilt
    client.settle()
    error = client.results[0][-1].error
    assert error is not None
    assert error.reason is Reason.NUMERICAL_ERROR
    assert client.tokens(0) == GREEDY_TEXT[:3]
    assert client.tokens(1) == OTHER_TEXT[:LENGTH]


def test_an_engine_that_can_run_none_of_several_sequences_says_so() -> None:
    client = two_sequences()
    lm: Any = client.engine.lm
    lm.forward = failing(lm.forward, lambda chunks: True)
    with pytest.raises(EngineFailedError):
        client.step()


def test_an_engine_that_can_run_nothing_time_after_time_says_so() -> None:
    client = Client(make_engine())
    lm: Any = client.engine.lm
    forward, broken = lm.forward, failing(lm.forward, lambda chunks: True)

    def run(number: int) -> None:
        client.send(opening(number, PROMPT, max_tokens=1), Lease(number, len(PROMPT), 1))
        client.step()

    lm.forward = broken
    for number in range(4):
        run(number)
    lm.forward = forward
    run(4)
    lm.forward = broken
    for number in range(5, 9):
        run(number)
    with pytest.raises(EngineFailedError):
        run(9)
