"""The router decides, between real services with costs as a calibration would give them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.text import Tokenizer
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.types import DrafterKind
from tests.router.client import PROMPT, greedy, request_for
from tests.services import Services

DRAFTERS = {
    DrafterKind.NGRAM: DraftCosts(base_seconds=1e-5, single_pass=True),
    DrafterKind.MODEL: DraftCosts(pass_seconds=1e-5),
}


@pytest.mark.parametrize(
    ("steps", "reason"),
    [(StepCosts(10.0, 1e-5), "speculating"), (StepCosts(1e-6, 1.0), "cost"), (None, "uncalibrated")],
)
async def test_whatever_is_decided_the_text_is_the_targets(
    model: Path, byte_level: Tokenizer, steps: StepCosts | None, reason: str
) -> None:
    expected = greedy(model, byte_level.encode_text(PROMPT), 60)
    async with Services.started(
        model, model, target={"costs": steps}, draft={"costs": DRAFTERS}, num_draft_tokens=5
    ) as services:
        for _ in range(3):
            answer = await services.generate_one(request_for(temperature=0, max_tokens=60))
            assert answer.ids == expected
            assert reason in answer.reasons
        await services.all_is_free()


async def test_many_at_once_are_decided_on_together_and_each_gets_its_own_text(
    services_of_both: Services,
) -> None:
    request = request_for(seed=3, max_tokens=40, temperature=1.2, ignore_eos=True)
    alone = await services_of_both.generate_one(request)
    request.n = 6
    answers = await services_of_both.generate(request)
    assert answers[0].ids == alone.ids
    assert all(len(answer.ids) == 40 for answer in answers)
    assert any("speculating" in answer.reasons for answer in answers)
    await services_of_both.all_is_free()


@pytest.fixture
async def services_of_both(model: Path) -> AsyncIterator[Services]:
    async with Services.started(
        model, model, target={"costs": StepCosts(10.0, 1e-5)}, draft={"costs": DRAFTERS}
    ) as services:
        yield services
