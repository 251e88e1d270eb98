"""Costs and load of real services as a router's links hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from router.replicas import DraftLink, Link, Listener, TargetLink
from router.text import Tokenizer
from specdecode import tokenizer
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.types import DecodeFrame, DrafterKind, Lease, StepFrame
from tests.router import tiny
from tests.services import DEADLINE, Drafts, Target, start_drafts, start_target
from tests.target.driver import opening

MESSAGE_BYTES = 2**20
COSTS = StepCosts(0.01, 1e-3, 1e-6, prefill_share=0.5, tokens=(1, 8), seconds=(0.011, 0.018))

L = TypeVar("L", bound=Link[Any, Any])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("model"))
    return tiny.save_llama(path, Tokenizer(path).vocab_size)


@asynccontextmanager
async def connected(
    kind: type[L], service: Target | Drafts, model: Path
) -> AsyncIterator[tuple[L, asyncio.Queue[StepFrame]]]:
    """A link to a service that is up, and the frames it hears; both end with it, whatever the test says."""
    up, frames = asyncio.Event(), asyncio.Queue[StepFrame]()
    fingerprint = tokenizer.fingerprint(tokenizer.load_tokenizer(model))
    listener = Listener[Any](up.set, frames.put_nowait, lambda: None)
    link = kind(service.address, MESSAGE_BYTES, fingerprint, listener)
    running = asyncio.create_task(link.run())
    try:
        await asyncio.wait_for(up.wait(), DEADLINE)
        yield link, frames
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await service.stop()


async def test_a_target_tells_its_costs_at_hello_and_its_load_with_every_step(model: Path) -> None:
    target = await start_target(model, costs=COSTS)
    async with connected(TargetLink, target, model) as (link, frames):
        assert link.costs == COSTS
        opened = opening(0, range(2, 12), max_tokens=200)
        link.send(DecodeFrame(opens=(opened,), leases=(Lease(0, 10, 200),)))
        frame = await asyncio.wait_for(frames.get(), DEADLINE)
        assert frame.load == link.load
        assert (link.load.num_ordered, link.load.num_ordered_tokens, link.load.expected_emitted) == (
            1,
            1,
            1.0,
        )
        # 10 prompt tokens, of which one needed logits, emitted one; of several steps the last one is told.
        num_tokens = link.load.tokens_in_flight
        assert num_tokens in (1, 10)
        step = COSTS.step(num_tokens, 1, link.load.num_cached_tokens)
        more = COSTS.step(num_tokens + 1, 2, link.load.num_cached_tokens)
        assert link.load.price == pytest.approx((more - step) / step, rel=1e-5)
        assert 0 <= link.load.idle_share <= 1
        assert link.load.cost_ratio > 0


async def test_a_target_that_was_not_measured_has_no_costs(model: Path) -> None:
    target = await start_target(model)
    async with connected(TargetLink, target, model) as (link, _):
        assert link.costs is None
        assert link.load.price == 0


async def test_costs_that_are_measured_again_reach_a_router_that_is_connected(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path))
    target = await start_target(model, costs=StepCosts(1e-5, 1e-9), recalibration_seconds=0.3)
    async with connected(TargetLink, target, model) as (link, frames):
        opened = opening(0, range(2, 12), max_tokens=240)
        link.send(DecodeFrame(opens=(opened,), leases=(Lease(0, 10, 240),)))
        assert link.costs == StepCosts(1e-5, 1e-9)
        costs = None
        while costs is None:
            costs = (await asyncio.wait_for(frames.get(), DEADLINE)).costs
        assert link.costs == costs
        assert costs.tokens[0] == 1


async def test_a_draft_service_tells_what_its_drafters_cost(model: Path) -> None:
    costs = {DrafterKind.NGRAM: DraftCosts(1e-5, single_pass=True), DrafterKind.MODEL: DraftCosts(1e-3, 6e-3)}
    drafts = await start_drafts(model, costs=costs)
    async with connected(DraftLink, drafts, model) as (link, _):
        assert link.costs == costs


async def test_a_draft_service_that_was_not_measured_has_no_costs(model: Path) -> None:
    drafts = await start_drafts(None)
    async with connected(DraftLink, drafts, model) as (link, _):
        assert link.costs == {}
