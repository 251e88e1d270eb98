"""What a collector gets of a request, through router, target and draft service over real gRPC."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from router.text import Tokenizer
from specdecode.types import Draft
from specdecode.v1 import router_service_pb2 as pb
from specdecode.wire import piece_from_proto
from tests.router.client import MODEL, PROMPT, greedy, request_for, speculating
from tests.router.scripted import Ask, scripted_drafts
from tests.services import Answer, Services, refusal
from tests.telemetry.collector import Collector, collector
from tests.telemetry.traced import (
    DECODE,
    DRAFT,
    LEASE,
    PARENT,
    PREFILL,
    ROUND,
    STEP,
    UNSAMPLED,
    VERIFY,
    check,
    check_usage,
    request_of,
    rounds_of,
    traced,
)

MAX_TOKENS = 24
VERIFIED = (VERIFY, [(STEP, [])])


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture
def reference(model: Path, byte_level: Tokenizer) -> list[int]:
    return greedy(model, byte_level.encode_text(PROMPT), 60)


def right(reference: Sequence[int], ask: Ask) -> Draft:
    at = len(ask.tokens) - ask.opened.num_prompt_tokens
    return ask.draft(tuple(reference[at : at + ask.order.num_draft_tokens]))


async def answer_in(services: Services, request: Any, traceparent: str = PARENT) -> Answer:
    """The only choice's answer, within a client's trace."""
    answer = Answer()
    call = services.router.stub.Generate(request, timeout=60, metadata=[("traceparent", traceparent)])
    async for message in call:
        answer.hear(piece_from_proto(message))
    return answer


async def test_where_all_is_accepted_each_round_has_its_draft_and_its_verification(
    model: Path, spans: Collector
) -> None:
    request = speculating(request_for(temperature=0, max_tokens=MAX_TOKENS), 4, MODEL)
    async with traced(spans, model, model) as services:
        answer = await answer_in(services, request)
    span = request_of(spans)
    check(spans, span, answer.usage)
    assert (span.trace_id, span.parent_id) == (PARENT.split("-")[1], PARENT.split("-")[2])
    first, *rounds = rounds_of(spans, span)
    assert spans.tree(first) == (LEASE, [(DECODE, [])])
    assert [spans.tree(each) for each in rounds[:-1]] == [(ROUND, [(DRAFT, []), VERIFIED])] * (
        len(rounds) - 1
    )
    assert all(each["accepted"] == each["drafted"] == each["num_draft_tokens"] for each in rounds)
    assert len(spans.named(PREFILL)) == 1


async def test_rounds_say_what_the_client_is_told_of_them(model: Path, spans: Collector) -> None:
    request = speculating(request_for(temperature=0, max_tokens=MAX_TOKENS), 4, MODEL)
    async with traced(spans, model, model) as services:
        answer = await answer_in(services, request)
    told = {span["round"]: span for span in rounds_of(spans, request_of(spans))}
    assert len(told) == len(answer.rounds)
    for record in answer.rounds:
        span = told[record.index]
        assert record.drafter is None or span["drafter"] == record.drafter.value
        assert (span["reason"], span["method"]) == (record.reason, "greedy")
        assert span["tokens_in_flight"] == record.tokens_in_flight
        for name in ("price", "predicted_emitted", "predicted_seconds", "seconds", "draft_seconds"):
            assert span[name] == pytest.approx(getattr(record, name), rel=1e-5)
        for name in ("queue", "forward", "verify", "step"):
            assert span[f"{name}_seconds"] == pytest.approx(getattr(record.times, name), rel=1e-5)
    verified = {span.parent_id: span for span in spans.named(VERIFY)}
    steps = {span.span_id: span for span in spans.named(STEP)}
    for span in (span for span in told.values() if span.name == ROUND):
        window = verified[span.span_id]
        assert (window["drafted"], window["accepted"]) == (span["drafted"], span["accepted"])
        assert window["forward_seconds"] == pytest.approx(span["forward_seconds"], rel=1e-5)
        ((_, step),) = window.links
        assert steps[step]["step"] == window["step"]
        assert (window["batch_size"], window["tokens_in_flight"]) == (1, window["drafted"] + 1)


async def test_the_requests_span_follows_the_conventions(model: Path, spans: Collector) -> None:
    request = request_for(temperature=0.5, top_p=0.9, top_k=7, seed=2**64 - 1, max_tokens=8)
    request.speculation.traffic_class = "tests"
    async with traced(spans, model) as services:
        answer = await answer_in(services, request)
    assert answer.usage is not None
    assert answer.finish_reason is not None
    span = request_of(spans)
    said = span.attributes
    assert span.name == f"text_completion {model}"
    assert span.service == "specdecode-router"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "specdecode",
        "gen_ai.request.model": str(model),
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": str(2**64 - 1),
        "gen_ai.request.stream": True,
        "gen_ai.response.id": answer.pieces[0].request_id,
        "gen_ai.response.finish_reasons": (answer.finish_reason.value,),
        "gen_ai.usage.input_tokens": answer.usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": answer.usage.num_emitted,
        "gen_ai.usage.cache_read.input_tokens": answer.usage.num_cached_tokens,
        "specdecode.method": "coupled",
        "specdecode.outcome": "finished",
        "specdecode.traffic_class": "tests",
    }
    assert {name: said[name] for name in expected} == expected
    assert 0 < said["gen_ai.response.time_to_first_chunk"] <= span.ended - span.began
    assert span.error is None


async def test_where_nothing_is_accepted_each_round_says_what_was_recovered(
    model: Path, spans: Collector, reference: list[int]
) -> None:
    def wrong(ask: Ask) -> Draft:
        found = right(reference, ask)
        return ask.draft(tuple((token + 1) % 200 for token in found.token_ids))

    request = speculating(request_for(temperature=0, max_tokens=MAX_TOKENS), 3, MODEL)
    async with (
        scripted_drafts(wrong) as (_, address),
        traced(spans, model, draft_address=address) as services,
    ):
        answer = await answer_in(services, request)
    check(spans, request_of(spans), answer.usage)
    rounds = [span for span in rounds_of(spans, request_of(spans)) if span["drafted"]]
    assert len(rounds) >= MAX_TOKENS - 3
    assert all(
        (span["accepted"], span["bonus"], span["recovered"], span["emitted"]) == (0, 0, 1, 1)
        for span in rounds
    )
    assert [spans.tree(span) for span in rounds] == [(ROUND, [VERIFIED])] * len(rounds)


async def test_a_stop_inside_a_run_cuts_the_round_that_tells_it(
    model: Path, spans: Collector, reference: list[int]
) -> None:
    at = next(i for i in range(10, 50) if reference[i] not in reference[:i])

    def script(ask: Ask) -> Draft:
        done = len(ask.tokens) - ask.opened.num_prompt_tokens
        found = right(reference, ask)
        return ask.draft(found.token_ids[:1]) if done < at - 1 else found

    request = speculating(request_for(temperature=0, max_tokens=60, stop_token_ids=[reference[at]]), 4, MODEL)
    async with (
        scripted_drafts(script) as (_, address),
        traced(spans, model, draft_address=address) as services,
    ):
        answer = await answer_in(services, request)
    assert answer.ids == reference[: at + 1]
    span = request_of(spans)
    check(spans, span, answer.usage)
    last = rounds_of(spans, span)[-1]
    assert last["drafted"] == 4
    assert 1 <= last["emitted"] == last["accepted"] < 4
    assert last["bonus"] == last["recovered"] == 0
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)


async def test_a_round_that_is_cancelled_is_told_as_broken(model: Path, spans: Collector) -> None:
    request = speculating(request_for(temperature=0, max_tokens=MAX_TOKENS), 4, MODEL)
    async with (
        scripted_drafts(lambda ask: None) as (drafts, address),
        traced(spans, model, draft_address=address, draft_deadline_seconds=60) as services,
    ):
        call = services.router.call(request)
        await call.read()
        await drafts.asked.wait()
        call.cancel()
        await services.all_is_free()
    span = request_of(spans)
    check(spans, span, None)
    assert (span["outcome"], span.error) == ("cancelled", None)
    first, broken = rounds_of(spans, span)
    assert (first["emitted"], first.name) == (1, LEASE)
    assert spans.tree(broken) == (ROUND, [])
    assert (broken["broken"], broken["emitted"], broken["num_draft_tokens"]) == ("CANCELLED", 0, 4)


async def test_a_draft_service_that_is_killed_ends_its_spans_not_the_trace(
    model: Path, spans: Collector
) -> None:
    request = speculating(request_for(temperature=0, max_tokens=200, ignore_eos=True), 4, MODEL)
    async with traced(spans, model, model) as services:
        answer = Answer()
        async for message in services.router.call(request):
            answer.hear(piece_from_proto(message))
            if services.drafts is not None and len(answer.ids) > 20:
                await services.drafts.stop()
    span = request_of(spans)
    check(spans, span, answer.usage)
    drafted = [bool(each["drafted"]) for each in rounds_of(spans, span) if each["reason"] != "first_token"]
    assert drafted == sorted(drafted, reverse=True)
    assert any(drafted)
    assert not all(drafted)
    assert rounds_of(spans, span)[-1]["reason"] == "drafter_unavailable"


async def test_a_replica_that_is_killed_is_told_with_the_round_that_it_broke(
    model: Path, spans: Collector
) -> None:
    request = speculating(request_for(temperature=0, max_tokens=150, ignore_eos=True), 4, MODEL)
    async with traced(spans, model, model, num_targets=2) as services:
        answer = Answer()
        lost = ""
        async for message in services.router.call(request):
            answer.hear(piece_from_proto(message))
            if not lost and len(answer.ids) > 20:
                (home,) = (target for target in services.targets if target.num_sequences)
                lost = home.address
                await home.stop()
    span = request_of(spans)
    check(spans, span, answer.usage)
    (failover,) = (event for event in span.events if event.name == "specdecode.failover")
    assert failover.attributes["specdecode.replica"] == lost
    (move,) = answer.pieces[-1].moves
    assert failover.attributes["specdecode.reason"] == move.reason
    rounds = rounds_of(spans, span)
    assert {each["replica"] for each in rounds} == {target.address for target in services.targets}
    assert len(spans.named(PREFILL)) == 2
    assert all(each.attributes.get("specdecode.broken") in (None, move.reason) for each in rounds)


async def test_plain_decoding_is_leases_alone(model: Path, spans: Collector) -> None:
    request = speculating(request_for(temperature=0, max_tokens=60, ignore_eos=True), 0, MODEL)
    async with traced(spans, model) as services:
        answer = await answer_in(services, request)
    span = request_of(spans)
    check(spans, span, answer.usage)
    assert not spans.named(ROUND)
    # A lease is renewed before it is used up, unless the machine is too busy for that.
    leases = rounds_of(spans, span)
    assert sum(lease["emitted"] for lease in leases) == sum(lease["rounds"] for lease in leases) == 60
    for lease in leases:
        assert (lease.name, lease["reason"]) == (LEASE, "request_off")
        assert lease["lease_tokens"] >= lease["emitted"]
        below = spans.children(lease)
        assert sum(each["steps"] for each in below) == lease["rounds"]
        assert {each.name for each in below} == {DECODE}
    (prefill,) = spans.named(PREFILL)
    assert prefill["tokens"] + prefill["cached_tokens"] == answer.usage.num_prompt_tokens - 1  # type: ignore[union-attr]


async def test_choices_are_told_apart(model: Path, spans: Collector) -> None:
    request = speculating(request_for(seed=3, max_tokens=MAX_TOKENS, ignore_eos=True), 3, MODEL)
    request.n = 3
    async with traced(spans, model, model) as services:
        answers = await services.generate(request)
    span = request_of(spans)
    check(spans, span, None)
    for choice, answer in enumerate(answers):
        own = [each.attributes for each in rounds_of(spans, span) if each["choice"] == choice]
        check_usage(own, answer.usage)
    assert span.attributes["gen_ai.usage.output_tokens"] == 3 * MAX_TOKENS
    # What was verified in one step links to the same one.
    windows = spans.named(VERIFY)
    assert len({each.links for each in windows}) == len({each["step"] for each in windows})


async def test_a_long_prompt_is_told_by_its_chunks(model: Path, spans: Collector) -> None:
    request = speculating(request_for([5, 6, 7, 8] * 20, temperature=0, max_tokens=2), 0, MODEL)
    async with traced(spans, model, target={"prefill_chunk": 32}) as services:
        await services.generate_one(request)
    (prefill,) = spans.named(PREFILL)
    chunks = [event.attributes["specdecode.tokens"] for event in prefill.events]
    assert (chunks, prefill["tokens"]) == ([32, 32, 15], 79)


async def test_a_preemption_is_told_with_what_is_computed_again(model: Path, spans: Collector) -> None:
    request = request_for([5, 6, 7, 8] * 8, temperature=0, max_tokens=100, ignore_eos=True)
    request.n = 3
    plain = speculating(request, 0, MODEL)
    async with traced(spans, model, target={"num_blocks": 16, "prefix_cache": False}) as services:
        answers = await services.generate(plain)
    preemptions = sum(answer.usage.num_preemptions for answer in answers if answer.usage)
    assert preemptions > 0
    again = [span for span in spans.named(PREFILL) if span["recompute"]]
    assert len(again) == preemptions
    events = [event for event in request_of(spans).events if event.name == "specdecode.preempted"]
    assert 0 < len(events) <= preemptions


@pytest.mark.parametrize("detail", ["events", "request"])
@pytest.mark.parametrize("asked_by_client", [True, False])
async def test_less_detail_leaves_one_span(
    model: Path, spans: Collector, detail: str, asked_by_client: bool
) -> None:
    request = speculating(request_for(temperature=0, max_tokens=MAX_TOKENS), 4, MODEL)
    settings = {} if asked_by_client else {"trace_detail": detail}
    if asked_by_client:
        request.trace_detail = getattr(pb, f"TRACE_DETAIL_{detail.upper()}")
    async with traced(spans, model, model, **settings) as services:
        answer = await answer_in(services, request)
    (span,) = spans.spans
    told = [event for event in span.events if event.name in (ROUND, LEASE)]
    if detail == "request":
        assert told == []
        assert span["rounds"] == len(answer.rounds)
    else:
        check_usage([event.attributes for event in told], answer.usage)


async def test_a_request_that_is_not_sampled_is_told_where_it_fails_or_is_slow(
    model: Path, spans: Collector
) -> None:
    request = speculating(request_for(temperature=0, max_tokens=MAX_TOKENS), 4, MODEL)
    async with traced(spans, model, model) as services:
        await answer_in(services, request, UNSAMPLED)
    assert spans.spans == []
    async with traced(spans, model, model, trace_slow_seconds=0) as services:
        answer = await answer_in(services, request, UNSAMPLED)
    (slow,) = spans.spans
    assert slow["trace_kept"] == "slow"
    check_usage([event.attributes for event in slow.events], answer.usage)
    spans.spans.clear()
    endless = speculating(request_for(temperature=0, max_tokens=200, ignore_eos=True), 4, MODEL)
    answer = Answer()
    async with traced(spans, model, model, failover_seconds=0) as services:
        call = services.router.stub.Generate(endless, timeout=60, metadata=[("traceparent", UNSAMPLED)])
        answer.hear(piece_from_proto(await call.read()))
        await services.target.stop()
        assert "no target replica" in ((await refusal(call)).details() or "")
    (failed,) = spans.spans
    assert (failed["trace_kept"], failed.attributes["error.type"]) == ("failed", "REPLICA_LOST")
    assert failed.error is not None
    emitted = [event.attributes.get("specdecode.emitted", 0) for event in failed.events]
    assert sum(emitted) == failed.attributes["gen_ai.usage.output_tokens"] >= len(answer.ids) > 0


async def test_a_refused_request_has_a_span_that_says_why(model: Path, spans: Collector) -> None:
    async with traced(spans, model) as services:
        with pytest.raises(Exception, match="temperature"):
            await answer_in(services, request_for(temperature=7))
        with pytest.raises(Exception, match="temperature"):
            await answer_in(services, request_for(temperature=7), UNSAMPLED)
    (span,) = spans.spans
    assert (span.attributes["error.type"], span["outcome"]) == ("INVALID_ARGUMENT", "failed")


async def test_ids_stay_unique_where_everything_is_seeded_alike(model: Path, spans: Collector) -> None:
    for _ in range(2):
        async with traced(spans, model, model, target={"engine_seed": 1}) as services:
            for _ in range(2):
                random.seed(1)
                request = speculating(request_for(seed=7, max_tokens=8, ignore_eos=True), 3, MODEL)
                await services.generate_one(request)
    assert len({span.trace_id for span in spans.requests}) == 4
    assert len({span.span_id for span in spans.spans}) == len(spans.spans)


async def test_untraced_orders_carry_nothing(model: Path) -> None:
    async with (
        scripted_drafts(lambda ask: ask.draft((9,))) as (drafts, address),
        Services.started(model, draft_address=address) as services,
    ):
        await services.generate_one(speculating(request_for(temperature=0, max_tokens=8), 2, MODEL))
    assert drafts.asks
    assert {ask.order.span_id for ask in drafts.asks} == {0}
