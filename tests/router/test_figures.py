"""What is measured about speculation: by hand-computed tables, by invariants, and through real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from router.figures import (
    MAX_TRAFFIC_CLASSES,
    OTHER_CLASS,
    ChoiceFigures,
    FigureBook,
    Tally,
    bucket_name,
)
from router.reasons import DecisionReason
from router.regret import Outlook
from router.request import Round
from specdecode import wire
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.figures import FigureLabel, Figures, speedup, speedups
from specdecode.types import DrafterKind, Method, Origin, StepResult, StepTimes
from specdecode.v1 import router_service_pb2 as pb
from tests.router.client import MODEL, NGRAM, request_for, speculating
from tests.services import DEADLINE, Answer, Services

LABEL = FigureLabel("0", "", DrafterKind.MODEL, Method.GREEDY)
ALPHAS = (0.80, 0.72, 0.66, 0.60, 0.55)
SPECULATING = Round(DrafterKind.MODEL, DecisionReason.SPECULATING, 0.0, 0.01, num_parameters=1000)
PLAIN = Round(None, DecisionReason.REQUEST_OFF, 0.0)
A, B, R, P = Origin.ACCEPTED, Origin.BONUS, Origin.RECOVERED, Origin.PLAIN


def result(
    num_drafted: int,
    tested: tuple[float, ...] = (),
    passed: tuple[float, ...] = (),
    step: float = 0.1,
) -> StepResult:
    return StepResult(1, 0, num_drafted=num_drafted, tested=tested, passed=passed, times=StepTimes(step=step))


def exact_round(num_drafted: int, alphas: tuple[float, ...] = ALPHAS) -> StepResult:
    """A round whose expectations are those of `alphas`."""
    reached, tested = 1.0, []
    for alpha in alphas[:num_drafted]:
        tested.append(reached)
        reached *= alpha
    passed = [*tested[1:], reached]
    return result(num_drafted, tuple(tested), tuple(passed))


def drafted(num_drafted: int, num_accepted: int, num_rounds: int = 1) -> Figures:
    """Rounds of one γ in which the same number was accepted; 0.1 s of step and 0.01 s for a drafted token."""
    tally = Tally()
    round_ = Round(DrafterKind.MODEL, DecisionReason.SPECULATING, 0.0, 0.01 * num_drafted)
    last = B if num_accepted == num_drafted else R
    for _ in range(num_rounds):
        seconds = 0.1 + round_.draft_seconds
        tally.count(exact_round(num_drafted), (*[A] * num_accepted, last), round_, seconds)
    return tally.figures(LABEL)


def plain(num_rounds: int) -> Figures:
    """Rounds without drafts of 0.1 s, told at once."""
    tally = Tally()
    tally.count(result(0), (P,) * num_rounds, PLAIN, 0.1 * num_rounds)
    return tally.figures(FigureLabel("0", "", None, Method.GREEDY))


# The table of a published example: E(γ) and E(γ) / (1 + c·γ) for c = 0.1, the bonus token counted.
@pytest.mark.parametrize(
    ("num_drafted", "emitted", "theoretical"),
    [(2, 2.376, 1.98), (3, 2.756, 2.12), (4, 2.984, 2.13), (5, 3.110, 2.07)],
)
def test_the_theoretical_speedup_is_the_table_for_measured_alphas_and_c(
    num_drafted: int, emitted: float, theoretical: float
) -> None:
    figures = drafted(num_drafted, 1, num_rounds=10)
    assert figures.alphas == pytest.approx(ALPHAS[:num_drafted])
    found = speedup(figures, plain(7))
    assert found is not None
    assert found.draft_cost == pytest.approx(0.1)
    assert found.theoretical == pytest.approx(theoretical, abs=0.005)
    assert found.theoretical * (1 + 0.1 * num_drafted) == pytest.approx(emitted, abs=0.0005)


def test_the_observed_speedup_is_what_tokens_cost_without_drafts_over_with() -> None:
    # 2 tokens in 0.13 s against 1 in 0.1 s.
    found = speedup(drafted(3, 1, num_rounds=4), plain(5))
    assert found is not None
    assert found.observed == pytest.approx(0.1 / 0.065)
    assert found.gap == pytest.approx(0.1 / 0.065 - found.theoretical)


def test_the_theoretical_speedup_of_mixed_rounds_weighs_them_by_number() -> None:
    tally = Tally()
    for num_drafted in (2, 2, 2, 4):
        tally.count(exact_round(num_drafted), (A, R), SPECULATING, 0.1)
    tally.count(result(0), (P,), Round(DrafterKind.MODEL, DecisionReason.DRAFT_EMPTY, 0.0), 0.1)
    # (3 · 2.376 + 2.984256 + 1) / (3 · 1.2 + 1.4 + 1)
    assert tally.figures(LABEL).theoretical_speedup(0.1) == pytest.approx(11.112256 / 6.0)


def test_without_plain_rounds_the_theory_is_told_alone() -> None:
    fast = drafted(2, 1)
    (alone,) = speedups([fast])
    assert alone is not None
    assert (alone.observed, alone.gap) == (None, None)
    assert alone.theoretical == pytest.approx(1.98)
    both, of_plain = speedups([fast, plain(2)])
    assert both is not None
    assert both.observed is not None
    assert of_plain is None


def test_rounds_of_another_kind_are_no_baseline() -> None:
    other = Tally().figures(FigureLabel("0-0.5", "", None, Method.GREEDY))
    found, _ = speedups([drafted(2, 1), other])
    assert found is not None
    assert found.observed is None


def test_counts_of_a_hand_computed_mix_of_rounds() -> None:
    tally = Tally()
    for num_drafted, origins in ((3, (A, A, R)), (3, (A, A, A, B)), (1, (R,)), (3, (A,)), (0, (P, P, P))):
        reason = DecisionReason.SPECULATING if num_drafted else DecisionReason.DRAFTER_LATE
        tally.count(
            result(num_drafted), origins, Round(DrafterKind.MODEL, reason, 0.0, num_parameters=10), 0.5
        )
    figures = tally.figures(LABEL)
    assert figures.runs == ((3,), (1, 0), (0, 0, 0), (0, 1, 1, 1))
    assert (figures.num_rounds, figures.num_speculated) == (7, 4)
    assert (figures.num_drafted, figures.num_accepted, figures.num_emitted) == (10, 6, 12)
    assert figures.drafted_by_position == (4, 3, 3)
    assert figures.accepted_by_position == (3, 2, 1)
    assert (figures.num_recovered, figures.num_cut, figures.num_fallbacks) == (2, 1, 3)
    assert figures.acceptance == 6 / 8
    assert figures.fallback_rate == 3 / 7
    assert figures.reason_shares == (("speculating", 4 / 7), ("drafter_late", 3 / 7))
    # 2 · 10 · (10 drafted + 7 of the target's own)
    assert figures.target_flops == 340
    assert figures.tokens_per_teraflop == pytest.approx(12 / 340 * 1e12)
    assert figures.seconds == 2.5


def test_a_round_that_took_in_the_prompt_is_counted_and_not_timed() -> None:
    tally = Tally()
    outlook = Outlook(1.0, (0.0,))
    opening = Round(
        None,
        DecisionReason.FIRST_TOKEN,
        0.0,
        predicted_emitted=1.0,
        predicted_seconds=0.1,
        outlook=outlook,
    )
    tally.count(result(0), (P,), opening, None)
    tally.count(result(0), (P, P), PLAIN, 0.25)
    figures = tally.figures(LABEL)
    assert (figures.num_rounds, figures.num_emitted, figures.num_timed, figures.timed_emitted) == (3, 3, 2, 2)
    assert figures.seconds_per_token == 0.125
    assert figures.predictions.num_rounds == figures.regret.num_rounds == 0


def test_no_rounds_are_no_shares() -> None:
    figures = Tally().figures(LABEL)
    assert figures.num_rounds == figures.num_drafted == 0
    assert figures.acceptance is figures.fallback_rate is figures.emitted_per_round is None
    assert figures.tokens_per_teraflop is figures.seconds_per_token is None


def test_predictions_are_compared_with_the_same_rounds_alone() -> None:
    tally = Tally()
    decided = Round(DrafterKind.MODEL, DecisionReason.SPECULATING, 0.0, 0.0, 2.5, 0.2)
    tally.count(result(3), (A, A, R), decided, 0.25)
    tally.count(result(3), (R,), decided, 0.25)
    tally.count(result(0), (P,), PLAIN, 9.0)
    told = tally.figures(LABEL).predictions
    assert (told.num_rounds, told.predicted_emitted, told.emitted) == (2, 5.0, 4)
    assert (told.predicted_seconds, told.seconds) == (0.4, 0.5)


def deciding(*lost: float) -> Round:
    """A round whose decision was compared."""
    return Round(DrafterKind.MODEL, DecisionReason.SPECULATING, 0.0, outlook=Outlook(1.0, lost))


def test_regret_against_a_length_beyond_what_a_round_could_have_is_that_of_its_longest() -> None:
    short, long = deciding(-0.5, 0.25), deciding(-0.5, 0.5, 1.0)
    for order in ((short, long), (long, short)):
        tally = Tally()
        for round_ in order:
            tally.count(result(0), (P,), round_, 1.0)
        regret = tally.figures(LABEL).regret
        assert regret.lost == (-1.0, 0.75, 1.25)
        assert (regret.num_rounds, regret.expected) == (2, 2.0)
        assert regret.shares == (-0.5, 0.375, 0.625)
    apart = Tally()
    for round_ in (short, long):
        part = Tally()
        part.count(result(0), (P,), round_, 1.0)
        apart.merge(part)
    assert apart.figures(LABEL) == tally.figures(LABEL)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[StepResult, tuple[Origin, ...], Round]:
    num_drafted = draw(st.integers(0, 5))
    if num_drafted == 0:
        return result(0), (P,) * draw(st.integers(1, 4)), PLAIN
    num_accepted = draw(st.integers(0, num_drafted))
    last = B if num_accepted == num_drafted else R
    cut = num_accepted > 0 and draw(st.booleans())
    return exact_round(num_drafted), (*[A] * num_accepted, *([] if cut else [last])), SPECULATING


@given(st.lists(rounds(), max_size=20), st.integers(0, 20))
def test_histogram_and_emitted_add_up_and_sums_of_parts_are_the_sum(
    counted: list[tuple[StepResult, tuple[Origin, ...], Round]], split: int
) -> None:
    whole, parts = Tally(), (Tally(), Tally())
    for index, (told, origins, round_) in enumerate(counted):
        for tally in (whole, parts[index >= split]):
            tally.count(told, origins, round_, 0.5)
    figures = whole.figures(LABEL)
    num_rounds = sum(1 if told.num_drafted else len(origins) for told, origins, _ in counted)
    assert sum(map(sum, figures.runs)) == sum(count for _, count in figures.reasons) == num_rounds
    assert figures.num_emitted == figures.num_accepted + num_rounds - figures.num_cut
    assert figures.num_emitted == sum(len(origins) for _, origins, _ in counted)
    assert figures.num_drafted == sum(told.num_drafted for told, _, _ in counted)
    parts[0].merge(parts[1])
    merged = parts[0].figures(LABEL)
    assert (merged.runs, merged.num_emitted) == (figures.runs, figures.num_emitted)
    assert merged.tested == pytest.approx(figures.tested)
    assert dict(merged.reasons) == dict(figures.reasons)


def counted_choice(traffic_class: str) -> ChoiceFigures:
    choice = ChoiceFigures(0.7, traffic_class, Method.REJECTION)
    choice.count(exact_round(2), (A, R), SPECULATING, 0.1)
    choice.count(result(0), (P,), PLAIN, 0.1)
    return choice


def test_memory_is_bounded_whatever_traffic_classes_come() -> None:
    book = FigureBook()
    for index in range(1000):
        book.add(counted_choice(f"class {index}"))
    running = counted_choice("one more")
    figures = book.figures([running])
    assert len(figures) == 2 * (MAX_TRAFFIC_CLASSES + 1)
    assert sum(entry.num_rounds for entry in figures) == 2002
    others = [entry for entry in figures if entry.label.traffic_class == OTHER_CLASS]
    assert [entry.num_rounds for entry in others] == [1001 - MAX_TRAFFIC_CLASSES] * 2
    # Asking changes nothing.
    assert book.figures([running]) == figures


@pytest.mark.parametrize(
    ("temperature", "bucket"),
    [
        (0.0, "0"),
        (1e-5, "0-0.5"),
        (0.49, "0-0.5"),
        (0.5, "0.5-0.9"),
        (1.0, "0.9-1.2"),
        (1.2, "1.2-2"),
        (2.0, "1.2-2"),
    ],
)
def test_temperatures_fall_into_buckets(temperature: float, bucket: str) -> None:
    assert bucket_name(temperature) == bucket


# Through real services


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(model: Path, other_model: Path) -> AsyncIterator[Services]:
    async with Services.started(model, other_model) as started:
        yield started


async def figures_of(services: Services) -> list[Figures]:
    told = await services.router.stub.GetFigures(pb.GetFiguresRequest(), timeout=DEADLINE)
    return [wire.figures_from_proto(entry) for entry in told.figures]


def reporting(request: pb.GenerateRequest, traffic_class: str) -> pb.GenerateRequest:
    request.include_report = True
    request.speculation.traffic_class = traffic_class
    return request


def check_report(answer: Answer) -> None:
    """The report tells of the same rounds as the records and the usage."""
    usage, report = answer.usage, answer.pieces[-1].report
    assert usage is not None
    assert all(not piece.report for piece in answer.pieces[:-1])
    assert sum(entry.num_rounds for entry in report) == usage.num_rounds
    assert sum(entry.num_drafted for entry in report) == usage.num_drafted
    assert sum(entry.num_accepted for entry in report) == usage.num_accepted
    assert sum(entry.num_emitted for entry in report) == usage.num_emitted
    assert sum(entry.num_recovered for entry in report) == usage.num_recovered
    reasons: dict[str, int] = {}
    for entry in report:
        for reason, count in entry.reasons:
            reasons[reason] = reasons.get(reason, 0) + count
    told = [record.reason for record in answer.rounds]
    assert reasons == {reason: told.count(reason) for reason in told}
    assert sum(entry.num_timed for entry in report) == usage.num_rounds - 1
    for entry in report:
        assert all(0 <= alpha <= 1 for alpha in entry.alphas)
        assert (entry.seconds > 0) is (entry.num_timed > 0)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("drafter", [NGRAM, MODEL])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_report_tells_what_usage_and_rounds_tell(
    services: Services, drafter: int, temperature: float
) -> None:
    request = speculating(request_for(temperature=temperature, max_tokens=40, top_k=8), 4, drafter)
    request.speculation.mode = pb.SPECULATION_MODE_ON
    answer = await services.generate_one(reporting(request, "reports"))
    check_report(answer)
    assert {entry.label.traffic_class for entry in answer.pieces[-1].report} == {"reports"}


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_is_reported_unasked(services: Services) -> None:
    answer = await services.generate_one(request_for(temperature=0, max_tokens=4))
    assert all(not piece.report for piece in answer.pieces)


@pytest.mark.asyncio(loop_scope="module")
async def test_aggregates_are_the_sums_of_reports(services: Services) -> None:
    answers = []
    for traffic_class in ("red", "red", "blue"):
        request = speculating(request_for(temperature=0, max_tokens=24), 3, NGRAM)
        request.n = 2
        answers.append(await services.generate(reporting(request, traffic_class)))
    known = [entry for entry in await figures_of(services) if entry.label.traffic_class in ("red", "blue")]
    for label in {entry.label for entry in known}:
        (total,) = (entry for entry in known if entry.label == label)
        parts = [
            entry
            for choices in answers
            for answer in choices
            for entry in answer.pieces[-1].report
            if entry.label == label
        ]
        assert total.num_rounds == sum(part.num_rounds for part in parts) > 0
        assert total.num_emitted == sum(part.num_emitted for part in parts)
        assert total.num_drafted == sum(part.num_drafted for part in parts)
        assert total.seconds == pytest.approx(sum(part.seconds for part in parts))
    emitted = sum(entry.num_emitted for entry in known if entry.label.traffic_class == "red")
    assert emitted == sum(len(answer.ids) for choices in answers[:2] for answer in choices)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_still_runs_is_in_the_aggregates_and_stays_when_it_is_cancelled(
    services: Services,
) -> None:
    request = speculating(request_for(temperature=0, max_tokens=200, ignore_eos=True), 0, NGRAM)
    call = services.router.call(reporting(request, "cancelled"))
    while not (await call.read()).tokens:
        pass
    running = [e for e in await figures_of(services) if e.label.traffic_class == "cancelled"]
    assert sum(entry.num_emitted for entry in running) > 0
    call.cancel()
    await services.all_is_free()
    ended = [e for e in await figures_of(services) if e.label.traffic_class == "cancelled"]
    assert sum(entry.num_emitted for entry in ended) >= sum(entry.num_emitted for entry in running)


async def test_what_decisions_expected_is_told_beside_what_came(model: Path) -> None:
    costs = {DrafterKind.MODEL: DraftCosts(pass_seconds=1e-5)}
    async with Services.started(
        model, model, target={"costs": StepCosts(0.01, 1e-6)}, draft={"costs": costs}
    ) as calibrated:
        request = request_for(temperature=0, max_tokens=200, ignore_eos=True)
        request.speculation.drafter = MODEL
        answer = await calibrated.generate_one(reporting(request, ""))
    check_report(answer)
    report = answer.pieces[-1].report
    predicted = [record for record in answer.rounds if record.predicted_seconds > 0 and record.index]
    assert sum(entry.predictions.num_rounds for entry in report) == len(predicted) > 0
    assert sum(entry.predictions.predicted_emitted for entry in report) == pytest.approx(
        sum(record.predicted_emitted for record in predicted), rel=1e-5
    )
    assert sum(entry.predictions.emitted for entry in report) == sum(r.num_emitted for r in predicted)
    compared = [entry.regret for entry in report if entry.regret.num_rounds]
    assert compared
    for regret in compared:
        # γ 0 to 8, the cap of requests that name none.
        assert len(regret.lost) == 9
        assert regret.expected >= regret.num_rounds
