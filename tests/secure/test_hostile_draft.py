"""A draft service that lies: real gRPC, every lie that can be seen through, and the one that can't."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from router.text import Tokenizer
from specdecode.config import RouterSettings
from specdecode.types import Draft, SparseDistributions
from specdecode.v1 import types_pb2
from tests.router.client import MODEL, PROMPT, greedy, logprobs, request_for, speculating
from tests.router.scripted import Ask, scripted_drafts
from tests.services import Answer, Services

LEAST_P_VALUE = 1e-4
ALLOWED = (30, 40, 50, 60)
"""Ids that the sampled requests may use, so that few samples tell distributions apart."""


def q_of(*positions: list[tuple[int, float]]) -> SparseDistributions:
    pairs = [pair for position in positions for pair in position]
    return SparseDistributions(
        np.array([len(position) for position in positions], np.int32),
        np.array([token for token, _ in pairs], np.int32),
        np.array([prob for _, prob in pairs], np.float32),
    )


Lie = Callable[[Ask], Draft]
Pair = tuple[int, int]


def one(ask: Ask, token: int, q: list[tuple[int, float]]) -> Draft:
    return ask.draft((token,), q=q_of(q))


SEEN: dict[str, Lie] = {
    "id above the vocabulary": lambda ask: ask.draft((10**6,)),
    "id above what is signed": lambda ask: ask.draft((2**31 + 5,)),
    "more than asked for": lambda ask: ask.draft((30,) * (ask.order.num_draft_tokens + 1)),
    "after another length": lambda ask: Draft(ask.order.sequence, len(ask.tokens) - 1, (30,)),
    "q is NaN": lambda ask: one(ask, 30, [(30, math.nan), (40, 0.5)]),
    "q is infinite": lambda ask: one(ask, 30, [(30, math.inf)]),
    "q is negative": lambda ask: one(ask, 30, [(30, 1.5), (40, -0.5)]),
    "q is 0 where it drafted": lambda ask: one(ask, 30, [(30, 0.0), (40, 1.0)]),
    "mass above 1": lambda ask: one(ask, 30, [(30, 1.0001)]),
    "mass below 1": lambda ask: one(ask, 30, [(30, 0.9999)]),
    "outside its own support": lambda ask: one(ask, 30, [(40, 1.0)]),
    "q outside the vocabulary": lambda ask: one(ask, 30, [(30, 0.5), (10**6, 0.5)]),
    "a token twice": lambda ask: one(ask, 30, [(30, 0.5), (30, 0.5)]),
    "q for another number of drafts": lambda ask: ask.draft((30,), q=q_of([(30, 1.0)], [(40, 1.0)])),
    "no support": lambda ask: ask.draft((30,), q=q_of([])),
}


def sampled(**options: Any) -> Any:
    request = speculating(request_for(max_tokens=3, ignore_eos=True, **options), 1, MODEL)
    request.sampling.allowed_token_ids.CopyFrom(types_pb2.TokenIds(ids=ALLOWED))
    return request


def lie_about_q(ask: Ask) -> Draft:
    """Always the same token, said to be one of four alike."""
    return one(ask, ALLOWED[0], [(token, 0.25) for token in ALLOWED])


async def first_pairs(services: Services, num_requests: int) -> tuple[Counter[Pair], int]:
    """The first two ids of many texts, and how often the second came of a round with drafts."""
    counts: Counter[Pair] = Counter()
    num_drafted = 0
    for _ in range(num_requests):
        request = sampled()
        request.n = 16
        answers = await services.generate(request)
        counts.update((answer.ids[0], answer.ids[1]) for answer in answers)
        num_drafted += sum(answer.rounds[1].num_drafted for answer in answers)
    return counts, num_drafted


def p_of(model: Path, history: list[int]) -> list[float]:
    """Of each allowed id after `history`."""
    row = logprobs(model, history, [ALLOWED[0]])[0][list(ALLOWED)].double()
    return (row - row.logsumexp(0)).exp().tolist()  # type: ignore[no-any-return]


def p_value(model: Path, tokenizer: Tokenizer, counts: Counter[Pair]) -> float:
    """Of the counts, were they drawn from the model's own distribution."""
    prompt = list(tokenizer.encode_text(PROMPT))
    total = sum(counts.values())
    expected = {
        (first, second): total * p_first * p_second
        for first, p_first in zip(ALLOWED, p_of(model, prompt), strict=True)
        for second, p_second in zip(ALLOWED, p_of(model, [*prompt, first]), strict=True)
    }
    # Cells that would hold next to nothing are put together.
    rare = [pair for pair, count in expected.items() if count < 5]
    seen = [counts[pair] for pair in expected if pair not in rare] + [sum(counts[pair] for pair in rare)]
    due = [count for pair, count in expected.items() if pair not in rare] + [
        sum(expected[pair] for pair in rare)
    ]
    cells = [(s, d) for s, d in zip(seen, due, strict=True) if d]
    return float(scipy.stats.chisquare([s for s, _ in cells], [d for _, d in cells]).pvalue)


@pytest.mark.parametrize("lie", SEEN)
async def test_a_lie_that_can_be_seen_is_no_draft_and_is_counted(
    model: Path, byte_level: Tokenizer, lie: str
) -> None:
    expected = greedy(model, byte_level.encode_text(PROMPT), 12)
    async with (
        scripted_drafts(SEEN[lie]) as (service, address),
        Services.started(model, draft_address=address) as services,
    ):
        answer: Answer = await services.generate_one(
            speculating(request_for(temperature=0, max_tokens=12), 4, MODEL)
        )
        assert answer.ids == expected
        drafted = speculating(request_for(temperature=1, max_tokens=12, ignore_eos=True), 4, MODEL)
        free = await services.generate_one(drafted)
        assert len(free.ids) == 12
        assert service.asks
        assert (answer.reasons | free.reasons) & {"draft_invalid", "drafter_unavailable"}
        assert not any(record.num_drafted for record in (*answer.rounds, *free.rounds))
        router: Any = services.router.running.on_stopped.__self__  # type: ignore[attr-defined]
        assert router._drafts.num_invalid > 0
        await services.all_is_free()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_seeded_text_is_the_same_whatever_is_said(model: Path, seed: int) -> None:
    request = speculating(request_for(seed=seed, max_tokens=30, ignore_eos=True), 4, MODEL)
    async with Services.started(model) as honest:
        expected = (await honest.generate_one(speculating(request, 0, MODEL))).ids
    for lie in (lie_about_q, SEEN["q is NaN"], lambda ask: ask.draft((30, 40))):
        async with (
            scripted_drafts(lie) as (_, address),
            Services.started(model, draft_address=address) as services,
        ):
            assert (await services.generate_one(request)).ids == expected


async def test_a_lie_about_q_changes_no_distribution_where_drafts_are_not_trusted(
    model: Path, byte_level: Tokenizer
) -> None:
    async with (
        scripted_drafts(lie_about_q) as (_, address),
        Services.started(model, draft_address=address, trust_draft="off") as services,
    ):
        counts, num_drafted = await first_pairs(services, 100)
    assert num_drafted > 800
    assert p_value(model, byte_level, counts) > LEAST_P_VALUE


async def test_the_same_lie_shows_where_drafts_are_trusted(model: Path, byte_level: Tokenizer) -> None:
    async with (
        scripted_drafts(lie_about_q) as (_, address),
        Services.started(model, draft_address=address, trust_draft="on") as services,
    ):
        counts, num_drafted = await first_pairs(services, 100)
    assert num_drafted > 800
    assert p_value(model, byte_level, counts) < 1e-9


@pytest.mark.parametrize(
    ("options", "believed"),
    [
        ({"draft": "127.0.0.1:1"}, True),
        ({"draft": "[::1]:1"}, True),
        ({"draft": "10.1.2.3:1"}, True),
        ({"draft": "specdecode-draft:1"}, True),
        ({"draft": "draft.ns.svc:1"}, True),
        ({"draft": "draft.ns.svc.cluster.local:1"}, True),
        ({"draft": "drafts.example.com:1"}, False),
        ({"draft": "8.8.8.8:1"}, False),
        ({"draft": "dns:///drafts.example.com:1"}, False),
        ({"draft": "drafts.example.com:1", "mesh_ca": "ca.pem"}, True),
        ({"draft": "drafts.example.com:1", "trust_draft": "on"}, True),
        ({"draft": "127.0.0.1:1", "trust_draft": "off"}, False),
    ],
)
def test_drafts_are_believed_by_default_where_they_are_the_operators_own(
    options: dict[str, Any], believed: bool
) -> None:
    assert RouterSettings(**options).believes_draft is believed
