"""The suffix drafter through real services: what one request put out drafts for the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode.v1 import types_pb2
from tests.router.client import NGRAM, request_for, speculating
from tests.services import Services

SUFFIX: int = types_pb2.DRAFTER_KIND_SUFFIX


@pytest.mark.parametrize("seed", [None, 5])
async def test_a_second_request_drafts_from_the_first_ones_output(model: Path, seed: int | None) -> None:
    async with Services.started(model, None, draft={"suffix_tokens": 10_000}) as services:
        request = request_for(max_tokens=40, ignore_eos=True, temperature=1.0 if seed else 0.0, seed=seed)
        off = await services.generate_one(request)
        asking = speculating(request, 8, SUFFIX)
        accepted = []
        for salt, forgotten in ((b"", False), (b"", False), (b"another", True), (b"another", False)):
            asking.cache_salt = salt
            asking.speculation.remember_output = not forgotten
            answer = await services.generate_one(asking)
            assert answer.ids == off.ids
            assert answer.usage is not None
            accepted.append(answer.usage.num_accepted)
            await services.all_is_free()
        assert accepted[1] > accepted[0] + 10
        # Neither what another tenant put out nor what was to be forgotten is drafted from.
        assert accepted[2] == accepted[3] == accepted[0]


async def test_requests_that_name_nobody_are_looked_up_for_once(model: Path) -> None:
    """N-gram look-ups beside suffix look-ups would find the same."""
    async with Services.started(model, None, draft={"suffix_tokens": 10_000}) as services:
        request = speculating(request_for(max_tokens=30, ignore_eos=True, temperature=0.0), 4, SUFFIX)
        request.speculation.ClearField("drafter")
        await services.generate_one(request)
        answer = await services.generate_one(request)
        assert {record.drafter.value for record in answer.rounds if record.drafter} == {"suffix"}
        named = await services.generate_one(speculating(request, 4, NGRAM))
        assert {record.drafter.value for record in named.rounds if record.drafter} == {"ngram"}
        assert named.ids == answer.ids
