"""The operator's limits while the router runs: what is checked, what is changed, and when it holds."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from router.policy_settings import PolicySettings
from router.reasons import DecisionReason
from router.run_time_policy import changed, differences, options_of
from router.text import Tokenizer
from specdecode import wire
from specdecode.errors import InvalidArgumentError
from specdecode.requests import PolicyOptions
from specdecode.serving import error_from_rpc
from specdecode.types import Draft, DrafterKind
from specdecode.v1 import router_service_pb2 as pb
from tests.router.client import NGRAM, request_for, speculating
from tests.router.scripted import Ask, Held, scripted_drafts
from tests.services import DEADLINE, Answer, Services, eventually

MODEL_LIMIT = (DrafterKind.MODEL, 0.5)
IN_FORCE = PolicySettings()


def test_what_is_not_given_stays() -> None:
    policy = PolicySettings(max_draft_tokens=7, probe_share=0.1, drafter=DrafterKind.NGRAM)
    assert changed(policy, PolicyOptions()) == policy
    off = changed(policy, PolicyOptions(enabled=False))
    assert off == PolicySettings(
        enabled=False, max_draft_tokens=7, probe_share=0.1, drafter=DrafterKind.NGRAM
    )
    assert changed(off, PolicyOptions(enabled=True)) == policy


def test_what_is_in_force_can_be_set_again_and_changes_nothing() -> None:
    policy = PolicySettings(max_tokens_in_flight=64, min_acceptances=(MODEL_LIMIT,))
    for entry in (policy, IN_FORCE):
        told = options_of(entry)
        assert None not in vars(told).values()
        assert changed(entry, told) == entry
        assert differences(entry, changed(entry, told)) == ""


def test_drafters_that_are_not_named_keep_their_limit() -> None:
    both = changed(
        changed(IN_FORCE, PolicyOptions(min_acceptances=(MODEL_LIMIT,))),
        PolicyOptions(min_acceptances=((DrafterKind.NGRAM, 0.2),)),
    )
    assert dict(both.min_acceptances) == {DrafterKind.MODEL: 0.5, DrafterKind.NGRAM: 0.2}
    later = changed(both, PolicyOptions(min_acceptances=((DrafterKind.MODEL, 0.0),)))
    assert dict(later.min_acceptances) == {DrafterKind.MODEL: 0.0, DrafterKind.NGRAM: 0.2}


def test_a_cap_of_no_tokens_in_flight_is_no_cap() -> None:
    capped = changed(IN_FORCE, PolicyOptions(max_tokens_in_flight=40))
    assert capped.max_tokens_in_flight == 40
    assert changed(capped, PolicyOptions(max_tokens_in_flight=0)).max_tokens_in_flight is None


def test_changes_are_said_in_words() -> None:
    after = changed(
        IN_FORCE,
        PolicyOptions(enabled=False, max_draft_tokens=4, min_acceptances=(MODEL_LIMIT,), lease_seconds=0.1),
    )
    assert differences(IN_FORCE, after) == (
        "enabled true -> false, max_draft_tokens 32 -> 4, min_acceptances {} -> {model: 0.5}, "
        "lease_seconds 0.25 -> 0.1"
    )


REFUSED: dict[str, list[Any]] = {
    "num_draft_tokens": [33],
    "max_draft_tokens": [33, 2**32 - 1],
    "max_tokens_in_flight": [2**18 + 1],
    "min_acceptance": [-0.01, 1.01, math.nan],
    "max_temperature": [-0.1, 2.01, math.nan, math.inf],
    "lease_seconds": [0.0, -1.0, 61.0, math.nan, math.inf],
    "batch_weight": [0.0, -1.0, 1.01, math.nan],
    "min_acceptances": [((DrafterKind.MODEL, 1.5),), ((DrafterKind.NGRAM, math.nan),)],
}


@pytest.mark.parametrize(("name", "value"), [(name, v) for name in REFUSED for v in REFUSED[name]])
def test_a_value_outside_its_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        changed(IN_FORCE, PolicyOptions(**{name: value}))
    assert [violation.field for violation in caught.value.violations] == [f"policy.{name}"]


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        changed(IN_FORCE, PolicyOptions(max_draft_tokens=33, max_temperature=1.0, batch_weight=2.0))
    fields = [violation.field for violation in caught.value.violations]
    assert fields == ["policy.max_draft_tokens", "policy.batch_weight"]


# Through real services


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(model: Path) -> AsyncIterator[Services]:
    async with Services.started(model) as started:
        yield started


async def set_policy(services: Services, **options: Any) -> PolicyOptions:
    message = pb.SetPolicyRequest(policy=wire.policy_to_proto(PolicyOptions(**options)))
    answer = await services.router.stub.SetPolicy(message, timeout=DEADLINE)
    return wire.policy_from_proto(answer.policy)


async def get_policy(services: Services) -> PolicyOptions:
    answer = await services.router.stub.GetPolicy(pb.GetPolicyRequest(), timeout=DEADLINE)
    return wire.policy_from_proto(answer.policy)


@pytest.mark.asyncio(loop_scope="module")
async def test_set_returns_what_is_in_force_and_get_tells_it(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    before = await get_policy(services)
    assert None not in vars(before).values()
    with caplog.at_level(logging.INFO):
        after = await set_policy(services, max_draft_tokens=3, min_acceptances=(MODEL_LIMIT,))
    assert (after.max_draft_tokens, after.min_acceptances) == (3, (MODEL_LIMIT,))
    assert after.num_draft_tokens == before.num_draft_tokens
    assert await get_policy(services) == after
    assert f"max_draft_tokens {before.max_draft_tokens} -> 3" in caplog.text
    await set_policy(services, max_draft_tokens=before.max_draft_tokens)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (pb.Policy(max_draft_tokens=33), "policy.max_draft_tokens"),
        (pb.Policy(lease_seconds=math.nan), "policy.lease_seconds"),
        (
            pb.Policy(min_acceptances=[pb.DrafterLimit(min_acceptance=0.5)]),
            "policy.min_acceptances[0].drafter",
        ),
        (
            pb.Policy(min_acceptances=[pb.DrafterLimit(drafter=NGRAM, min_acceptance=2)]),
            "policy.min_acceptances",
        ),
    ],
)
async def test_bad_limits_are_refused_by_field_and_change_nothing(
    services: Services, policy: pb.Policy, field: str
) -> None:
    before = await get_policy(services)
    policy.max_temperature = 0.25
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await services.router.stub.SetPolicy(pb.SetPolicyRequest(policy=policy), timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    told = error_from_rpc(caught.value)
    assert [violation.field for violation in told.violations] == [field]
    assert await get_policy(services) == before


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("limits", "back", "temperature", "reason"),
    [
        ({"enabled": False}, {"enabled": True}, 0.0, DecisionReason.CAP_DRAFT_TOKENS),
        ({"max_draft_tokens": 0}, {"max_draft_tokens": 32}, 0.0, DecisionReason.CAP_DRAFT_TOKENS),
        ({"max_tokens_in_flight": 1}, {"max_tokens_in_flight": 0}, 0.0, DecisionReason.CAP_TOKENS_IN_FLIGHT),
        ({"max_temperature": 0.5}, {"max_temperature": 2.0}, 0.9, DecisionReason.TEMPERATURE),
    ],
)
async def test_operators_limits_override_requests_until_they_are_lifted(
    services: Services,
    limits: dict[str, Any],
    back: dict[str, Any],
    temperature: float,
    reason: DecisionReason,
) -> None:
    request = speculating(
        request_for("aaaa aaaa aaaa", temperature=temperature, max_tokens=40, seed=3), 4, NGRAM
    )
    request.speculation.mode = pb.SPECULATION_MODE_ON
    await set_policy(services, **limits)
    limited = await services.generate_one(request)
    await set_policy(services, **back)
    free = await services.generate_one(request)
    assert limited.usage is not None
    assert limited.usage.num_drafted == 0
    assert reason in limited.reasons
    assert free.usage is not None
    assert free.usage.num_drafted > 0
    assert limited.ids == free.ids


async def test_a_limit_holds_for_running_requests_from_the_next_decision_on(
    model: Path, byte_level: Tokenizer
) -> None:
    def script(ask: Ask) -> Draft | Held:
        draft = ask.draft(tuple(ask.tokens[-2:]))
        return Held(draft) if len(drafts.asks) == 3 else draft

    async with (
        scripted_drafts(script, byte_level.fingerprint) as (drafts, address),
        Services.started(model, draft_address=address, draft_deadline_seconds=60) as services,
    ):
        request = speculating(request_for(temperature=0, max_tokens=60, ignore_eos=True), 2, NGRAM)
        request.speculation.mode = pb.SPECULATION_MODE_ON
        call = services.router.call(request)
        await eventually(lambda: len(drafts.asks) == 3, "three rounds ask for drafts")
        # The third round waits for its draft while the limit changes.
        await set_policy(services, enabled=False)
        drafts.send_held()
        answer = Answer()
        async for message in call:
            answer.hear(wire.piece_from_proto(message))
        assert len(drafts.asks) == 3
        assert drafts.violations == []
        assert answer.usage is not None
        assert answer.usage.num_emitted == 60
        speculated = [record for record in answer.rounds if record.num_drafted]
        assert len(speculated) == 3
        after = answer.rounds[speculated[-1].index + 1 :]
        assert after
        assert {record.reason for record in after} <= {
            DecisionReason.CAP_DRAFT_TOKENS,
            DecisionReason.LAST_TOKEN,
        }
