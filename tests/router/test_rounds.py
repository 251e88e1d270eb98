"""Rounds as the policy wants them, between a target and a draft service of the test's own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from router.router import Router
from router.text import Tokenizer
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.errors import InvalidArgumentError
from specdecode.types import Draft, DrafterKind, LoadSnapshot, RoundRecord
from specdecode.wire import piece_from_proto
from tests.router.client import NGRAM, PROMPT, request_for, speculating
from tests.router.scripted import Ask, Held, Script, ScriptedDrafts, scripted_drafts
from tests.router.scripted_target import TOKEN, Accepts, ScriptedTarget, scripted_target
from tests.services import Answer, RouterUnderTest, start_router

MEMORY_BOUND = StepCosts(0.010, 1e-6)
COMPUTE_BOUND = StepCosts(1e-6, 0.010)
# Drafting takes what it takes on this machine, which must not count.
LOAD = LoadSnapshot(num_running=1, num_free_blocks=1000, num_blocks=1000, step_seconds=0.010, idle_share=0.0)
CHEAP = DraftCosts(base_seconds=1e-6, token_seconds=1e-9, single_pass=True)
NGRAM_ALONE = {DrafterKind.NGRAM: CHEAP}
BY_PASSES = {DrafterKind.NGRAM: replace(CHEAP, single_pass=False)}
"""A drafter that is tried by probes: only what is looked up can be compared beside a lease."""


def right(ask: Ask) -> Draft:
    return ask.draft((TOKEN,) * ask.order.num_draft_tokens)


@dataclass
class Bench:
    """A router between the two."""

    router: RouterUnderTest
    target: ScriptedTarget
    drafts: ScriptedDrafts

    @property
    def inner(self) -> Router:
        """The router itself."""
        router: Router = self.router.running.on_stopped.__self__  # type: ignore[attr-defined]
        return router

    async def answer(self, request: Any) -> Answer:
        """The only choice of a request, to its end."""
        answer = Answer()
        async for message in self.router.call(request):
            answer.hear(piece_from_proto(message))
        assert self.target.violations == []
        assert self.drafts.violations == []
        return answer


@asynccontextmanager
async def bench(
    model: Path,
    costs: StepCosts | None = MEMORY_BOUND,
    script: Script = right,
    accepts: Accepts = lambda sequence, verify: len(verify.drafted),
    load: LoadSnapshot = LOAD,
    draft_costs: dict[DrafterKind, DraftCosts] | None = None,
    kinds: tuple[DrafterKind, ...] = (DrafterKind.NGRAM,),
    **settings: Any,
) -> AsyncIterator[Bench]:
    fingerprint = Tokenizer(model).fingerprint
    drafting = NGRAM_ALONE if draft_costs is None else draft_costs
    async with (
        scripted_target(fingerprint, costs, load, accepts) as (target, address),
        scripted_drafts(script, fingerprint, drafting, kinds) as (drafts, draft_address),
    ):
        router = await start_router(model, [address], draft_address, **settings)
        try:
            yield Bench(router, target, drafts)
        finally:
            await router.stop()


def automatic(max_tokens: int, **sampling: Any) -> Any:
    return request_for(PROMPT, max_tokens=max_tokens, ignore_eos=True, **sampling)


def drafted(rounds: list[RoundRecord]) -> list[int]:
    return [record.num_drafted for record in rounds]


async def test_a_memory_bound_target_gets_long_drafts_as_soon_as_they_prove_right(model: Path) -> None:
    async with bench(model) as services:
        answer = await services.answer(automatic(100))
        assert answer.reasons <= {"first_token", "speculating", "last_token"}
        assert max(drafted(answer.rounds)) == 8
        assert len(answer.rounds) < 30


async def test_what_was_predicted_is_told_with_each_round(model: Path) -> None:
    async with bench(model, load=replace(LOAD, tokens_in_flight=7)) as services:
        answer = await services.answer(automatic(60))
        speculating_rounds = [record for record in answer.rounds if record.reason == "speculating"]
        for record in speculating_rounds:
            assert 1 <= record.predicted_emitted <= 1 + record.num_drafted
            assert record.predicted_seconds >= 0.010
            assert record.price > 0
            assert record.tokens_in_flight == 7
        assert speculating_rounds[-1].predicted_emitted > speculating_rounds[0].predicted_emitted


async def test_a_compute_bound_target_decodes_by_leases_and_the_drafter_never_hears_of_it(
    model: Path,
) -> None:
    async with bench(model, COMPUTE_BOUND, draft_costs=BY_PASSES) as services:
        answer = await services.answer(automatic(100))
        assert answer.reasons == {"cost", "last_token"} or answer.reasons == {"cost"}
        assert services.drafts.asks == []
        assert services.drafts.num_streams == 1
        num_leases = sum(len(frame.leases) for frame in services.target.orders)
        assert num_leases <= 100 / 8 + 2


async def test_leases_are_renewed_before_they_run_out(model: Path) -> None:
    async with bench(model, COMPUTE_BOUND) as services:
        await services.answer(automatic(100))
        leases = [lease for frame in services.target.orders for lease in frame.leases]
        ends = [lease.committed_length + lease.num_tokens for lease in leases]
        starts = [lease.committed_length for lease in leases]
        assert all(start < end for start, end in zip(starts[1:], ends, strict=False))


async def test_a_lease_is_never_shortened_when_steps_get_slower(model: Path) -> None:
    """Nobody can draft, so that leases are all there is; at 0.3 s a step the next ones are of one token."""
    async with bench(model, COMPUTE_BOUND, draft_costs={}) as services:
        services.target.load = replace(LOAD, step_seconds=0.3)
        services.target.pause_seconds = 0.005
        answer = await services.answer(automatic(40))  # violations are none
        assert sum(record.num_emitted for record in answer.rounds) == 40
        sizes = [x.num_tokens for frame in services.target.orders for x in frame.leases]
        assert sizes[0] == 16
        assert set(sizes[1:]) == {1}


async def test_nothing_is_drafted_after_tokens_that_a_lease_on_its_way_overtakes(model: Path) -> None:
    """A drafter that is always wrong: leases, and a probe now and then."""
    async with bench(model, accepts=lambda sequence, verify: 0, draft_costs=BY_PASSES) as services:
        services.target.renewals_are_late = True
        for _ in range(4):
            answer = await services.answer(automatic(200))  # violations are none
            assert sum(record.num_emitted for record in answer.rounds) == 200
            assert "probe" in answer.reasons
        assert services.drafts.asks


async def test_leases_are_shorter_where_steps_are_slow(model: Path) -> None:
    async with bench(model, COMPUTE_BOUND, load=replace(LOAD, step_seconds=0.1)) as services:
        await services.answer(automatic(40))
        assert {x.num_tokens for frame in services.target.orders for x in frame.leases} <= {1, 2}


async def test_without_costs_nothing_is_drafted_and_the_round_says_so(model: Path) -> None:
    for costs, drafting in ((None, NGRAM_ALONE), (MEMORY_BOUND, {})):
        async with bench(model, costs, draft_costs=drafting) as services:
            answer = await services.answer(automatic(30))
            assert "uncalibrated" in answer.reasons
            assert services.drafts.asks == []
            insisting = await services.answer(speculating(automatic(30), 3, NGRAM))
            assert "speculating" in insisting.reasons


async def test_speculation_follows_the_load_both_ways(model: Path) -> None:
    def accepts(sequence: Any, verify: Any) -> int:
        return min(len(verify.drafted), sequence.length % 3)

    async with bench(model, StepCosts(0.010, 0.001), accepts=accepts) as services:
        answer = Answer()
        async for message in services.router.call(automatic(600)):
            answer.hear(piece_from_proto(message))
            done = len(answer.tokens)
            busy = 200 <= done < 400
            services.target.load = (
                replace(
                    LOAD, num_running=5000, num_ordered=4999, num_ordered_tokens=4999, expected_emitted=4999
                )
                if busy
                else LOAD
            )
        reasons = [record.reason for record in answer.rounds]
        first, last = reasons.index("cost"), len(reasons) - 1 - reasons[::-1].index("cost")
        assert "speculating" in reasons[:first]
        assert "speculating" in reasons[last:]


async def test_a_drafter_that_is_always_wrong_is_left_and_probed_ever_more_rarely(model: Path) -> None:
    costs, drafting = StepCosts(0.010, 0.003), {DrafterKind.MODEL: BY_PASSES[DrafterKind.NGRAM]}
    kinds = (DrafterKind.MODEL,)
    async with bench(model, costs, accepts=lambda s, v: 0, draft_costs=drafting, kinds=kinds) as services:
        answer = await services.answer(automatic(800))
        reasons = [record.reason for record in answer.rounds]
        probes = [index for index, reason in enumerate(reasons) if reason == "probe"]
        assert reasons.count("speculating") < 20
        gaps = [later - earlier for earlier, later in itertools.pairwise(probes)]
        # At first it is the budget that keeps them apart.
        assert min(gaps) * 0.015 * LOAD.step_seconds >= 0.9 * 2 * 0.003
        assert gaps[-3:] == sorted(gaps)[-3:]
        assert gaps[-1] > 4 * gaps[0]
        share = sum(record.num_drafted for record in answer.rounds) * 0.003 / (0.013 * len(answer.rounds))
        assert share < 0.05


async def test_a_probe_that_pays_brings_drafting_back(model: Path) -> None:
    def accepts(sequence: Any, verify: Any) -> int:
        return len(verify.drafted) if sequence.num_output > 300 else 0

    async with bench(model, StepCosts(0.010, 0.003), accepts=accepts, draft_costs=BY_PASSES) as services:
        answer = await services.answer(automatic(900))
        reasons = [record.reason for record in answer.rounds]
        last_probe = len(reasons) - 1 - reasons[::-1].index("probe")
        assert reasons[last_probe:].count("speculating") > 5


async def test_what_is_looked_up_beside_leases_brings_drafting_back(model: Path) -> None:
    """Wrong up to 300 tokens, then right: nothing but leases in between, and no round is spent on trying."""

    def script(ask: Ask) -> Draft:
        token = TOKEN if len(ask.tokens) > 300 else TOKEN + 1
        return ask.draft((token,) * ask.order.num_draft_tokens)

    def accepts(sequence: Any, verify: Any) -> int:
        return len(verify.drafted) if set(verify.drafted) == {TOKEN} else 0

    async with bench(model, StepCosts(0.010, 0.003), script, accepts) as services:
        answer = await services.answer(automatic(600))
        reasons = [record.reason for record in answer.rounds]
        assert "probe" not in reasons
        rejected = [record for record in answer.rounds if record.num_drafted and not record.num_accepted]
        assert len(rejected) < 10
        assert reasons[-50:].count("speculating") > 20
        asked = len(services.drafts.asks)
        verified = sum(len(frame.verifies) for frame in services.target.orders)
        assert verified < asked < verified + 40


async def test_nothing_found_beside_leases_costs_no_round(model: Path) -> None:
    async with bench(model, StepCosts(0.010, 0.003), lambda ask: ask.draft(())) as services:
        answer = await services.answer(automatic(400))
        reasons = [record.reason for record in answer.rounds]
        assert reasons.count("draft_empty") < 4
        assert set(reasons) <= {"draft_empty", "cost", "first_token", "last_token"}
        assert 8 < len(services.drafts.asks) < 40


async def test_the_drafter_that_is_right_wins(model: Path) -> None:
    def script(ask: Ask) -> Draft:
        return right(ask) if ask.opened.drafter is DrafterKind.MODEL else ask.draft(())

    costs = {DrafterKind.NGRAM: CHEAP, DrafterKind.MODEL: DraftCosts(pass_seconds=1e-4)}
    kinds = (DrafterKind.NGRAM, DrafterKind.MODEL)
    async with bench(model, script=script, draft_costs=costs, kinds=kinds) as services:
        answer = await services.answer(automatic(200))
        by = [record.drafter for record in answer.rounds if record.num_drafted]
        assert by.count(DrafterKind.MODEL) > 0.8 * len(by)


async def test_what_one_request_learnt_the_next_one_knows(model: Path) -> None:
    costs = StepCosts(0.010, 0.004)
    async with bench(model, costs, accepts=lambda s, v: 0, draft_costs=BY_PASSES) as services:
        for _ in range(8):
            last = await services.answer(automatic(40))
        assert last.rounds[0].reason == "cost"
        assert sum(drafted(last.rounds)) <= 2


async def test_estimates_survive_a_restart(model: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "estimates.json")
    async with bench(model, estimates_path=path) as services:
        await services.answer(automatic(100))
    async with bench(model, estimates_path=path) as services:
        answer = await services.answer(automatic(40))
        assert drafted(answer.rounds)[1] == 8


async def test_a_drafter_that_refuses_a_request_is_not_asked_again(model: Path) -> None:
    def refuse(ask: Ask) -> Draft:
        return ask.draft((), error=InvalidArgumentError.of("sampling.logit_bias", "unknown id"))

    async with bench(model, script=refuse) as services:
        answer = await services.answer(speculating(automatic(100), 4, NGRAM))
        assert "unsupported" in answer.reasons
        assert len(services.drafts.asks) == 1


async def test_a_late_answer_of_one_drafter_is_not_taken_for_the_others(model: Path) -> None:
    def script(ask: Ask) -> Draft | Held:
        if ask.opened.drafter is DrafterKind.MODEL:
            return Held(ask.draft((7,) * ask.order.num_draft_tokens))
        service.drafts.send_held()
        return right(ask)

    costs = {DrafterKind.NGRAM: CHEAP, DrafterKind.MODEL: CHEAP}
    kinds = (DrafterKind.NGRAM, DrafterKind.MODEL)
    async with bench(
        model, script=script, draft_costs=costs, kinds=kinds, draft_deadline_seconds=0.1
    ) as service:
        answer = await service.answer(automatic(60))
        assert "drafter_late" in answer.reasons
        assert {token.token_id for token in answer.tokens} == {TOKEN}


async def test_a_policy_that_is_replaced_is_in_force_at_once(model: Path) -> None:
    async with bench(model) as services:
        answer = Answer()
        async for message in services.router.call(automatic(400)):
            answer.hear(piece_from_proto(message))
            if len(answer.tokens) > 100 and services.inner.policy.enabled:
                services.inner.policy = replace(services.inner.policy, enabled=False)
        reasons = [record.reason for record in answer.rounds]
        assert "speculating" in reasons[: reasons.index("cap_draft_tokens")]
        assert set(reasons[reasons.index("cap_draft_tokens") :]) <= {"cap_draft_tokens", "last_token"}


async def test_the_length_never_depends_on_what_is_drafted(model: Path) -> None:
    """For target (0.7, 0.3) and draft (0.5, 0.5), dropping a draft for the looks of its token gives
    (0.85, 0.15): what is asked for, and what is sent to be verified, is the same whatever the drafts are.
    """

    async def lengths(token: int) -> tuple[list[int], list[int]]:
        def script(ask: Ask) -> Draft:
            return ask.draft((token,) * ask.order.num_draft_tokens)

        async with bench(model, script=script, accepts=lambda s, v: s.length % 2) as services:
            await services.answer(automatic(60, temperature=1.0))
            asked = [ask.order.num_draft_tokens for ask in services.drafts.asks]
            sent = [len(verify.drafted) for frame in services.target.orders for verify in frame.verifies]
            return asked, sent

    likely, unlikely = await lengths(TOKEN), await lengths(11)
    assert likely == unlikely
    assert likely[0] == likely[1]


async def test_requests_that_constrain_the_text_teach_nothing_to_others(model: Path) -> None:
    async with bench(model, accepts=lambda s, v: 0) as services:
        request = automatic(40)
        request.sampling.banned_token_ids.append(8)
        await services.answer(request)
        estimates = services.inner._estimates.estimates
        assert all(not entry.tested for entry in estimates._classes.values())
        await services.answer(automatic(40))
        assert any(entry.tested for entry in estimates._classes.values())
