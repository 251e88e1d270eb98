from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.policy import DecisionReason
from router.request import MAX_BUFFERED_TOKENS, Choice, Request, Round
from router.text import Tokenizer
from router.validation import ResolvedRequest
from specdecode.errors import InternalError, NumericalError, Reason
from specdecode.requests import Piece, SpeculationMode
from specdecode.types import (
    DrafterKind,
    FinishReason,
    Method,
    Origin,
    SamplingParams,
    StepResult,
    TokenLogprobs,
)

PROMPT = (5, 6, 7)
SPECULATING = Round(DrafterKind.NGRAM, DecisionReason.SPECULATING, began=1.0, draft_seconds=0.25)
LEASED = Round(None, DecisionReason.REQUEST_OFF, began=1.0)
BY_LETTER = {"a": Origin.ACCEPTED, "b": Origin.BONUS, "r": Origin.RECOVERED, "p": Origin.PLAIN}


def new_choice(tokenizer: Tokenizer, stops: tuple[str, ...] = (), n: int = 1, min_tokens: int = 0) -> Choice:
    resolved = ResolvedRequest(
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=1000, min_tokens=min_tokens),
        stops=stops,
        method=Method.REJECTION,
        seed=0,
        n=n,
        mode=SpeculationMode.AUTO,
        num_draft_tokens=4,
        drafter=None,
        include_rounds=True,
        cache_salt=b"",
    )
    return Request("request", resolved, tokenizer).choices[n - 1]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """One id a character, as the target might emit them."""
    return [tokenizer._backend.encode(char).ids[0] for char in text]


def result(
    choice: Choice,
    ids: Sequence[int],
    origins: str,
    num_drafted: int = 0,
    finish_reason: FinishReason | None = None,
    num_cached_tokens: int = 0,
    num_preemptions: int = 0,
) -> StepResult:
    """`origins` has one letter a token: accepted, bonus, recovered, plain."""
    assert len(ids) == len(origins)
    return StepResult(
        sequence=1,
        committed_length=len(choice.tokens) + len(ids),
        token_ids=tuple(ids),
        origins=tuple(BY_LETTER[letter] for letter in origins),
        num_drafted=num_drafted,
        num_accepted=origins.count("a"),
        logprobs=tuple(TokenLogprobs(token, -0.5 * token, 1) for token in ids),
        finish_reason=finish_reason,
        num_cached_tokens=num_cached_tokens,
        num_preemptions=num_preemptions,
    )


def said(choice: Choice) -> Piece:
    piece = choice.take_piece()
    assert piece is not None
    return piece


def test_a_stop_string_inside_an_accepted_run_cuts_text_ids_logprobs_rounds_and_usage(
    byte_level: Tokenizer,
) -> None:
    choice = new_choice(byte_level, stops=("##",))
    ids = ids_of(byte_level, "ab##cd")
    choice.take(result(choice, ids, "aaaaab", num_drafted=5), SPECULATING, now=3.0)
    piece = said(choice)
    assert (piece.text, piece.stop, piece.finish_reason) == ("ab", "##", FinishReason.STOP)
    assert [token.token_id for token in piece.tokens] == ids[:4]
    assert [token.logprobs.token_id for token in piece.tokens if token.logprobs] == ids[:4]
    assert choice.tokens == [*PROMPT, *ids[:4]]
    (record,) = piece.rounds
    assert (record.num_drafted, record.num_accepted, record.num_emitted) == (5, 4, 4)
    assert (record.last_origin, record.seconds) == (Origin.ACCEPTED, 2.0)
    assert piece.usage == choice.usage
    assert (choice.usage.num_emitted, choice.usage.num_accepted, choice.usage.num_bonus) == (4, 4, 0)


def test_the_earliest_boundary_wins_over_the_targets_own(byte_level: Tokenizer) -> None:
    choice = new_choice(byte_level, stops=("b",))
    ids = [*ids_of(byte_level, "abc"), byte_level.eos_token_ids[0]]
    choice.take(result(choice, ids, "aaab", 3, FinishReason.LENGTH), SPECULATING, now=2.0)
    piece = said(choice)
    assert (piece.text, piece.finish_reason, piece.stop) == ("a", FinishReason.STOP, "b")
    assert choice.usage.num_emitted == 2


def test_the_stop_id_is_the_last_id_and_says_nothing(byte_level: Tokenizer) -> None:
    choice = new_choice(byte_level, stops=("zz",))
    ids = [*ids_of(byte_level, "az"), byte_level.eos_token_ids[0]]
    choice.take(result(choice, ids, "aar", 4, FinishReason.STOP), SPECULATING, now=2.0)
    piece = said(choice)
    assert (piece.text, piece.finish_reason, piece.stop) == ("az", FinishReason.STOP, None)
    assert [token.token_id for token in piece.tokens] == ids


def test_tokens_wait_with_their_text_and_rounds_do_not(byte_level: Tokenizer) -> None:
    choice = new_choice(byte_level, stops=("##",))
    first, second = ids_of(byte_level, "#x")
    choice.take(result(choice, [first], "p"), LEASED, now=2.0)
    piece = said(choice)
    assert (piece.text, piece.tokens, len(piece.rounds)) == ("", (), 1)
    choice.take(result(choice, [second], "p"), LEASED, now=3.0)
    piece = said(choice)
    assert (piece.text, [token.token_id for token in piece.tokens]) == ("#x", [first, second])
    assert choice.take_piece() is None


def test_leased_steps_that_come_merged_are_one_round_each(byte_level: Tokenizer) -> None:
    choice = new_choice(byte_level)
    choice.take(result(choice, ids_of(byte_level, "abc"), "ppp"), LEASED, now=4.0)
    records = said(choice).rounds
    assert [record.index for record in records] == [0, 1, 2]
    assert [record.seconds for record in records] == [1.0, 1.0, 1.0]
    assert {record.drafter for record in records} == {None}
    assert choice.usage.num_rounds == 3


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rounds=st.lists(st.from_regex(r"a{0,4}[br]|p{1,3}", fullmatch=True), min_size=1, max_size=8),
    data=st.data(),
)
def test_emitted_is_accepted_plus_bonus_plus_recovered_plus_plain(
    byte_level: Tokenizer, rounds: list[str], data: st.DataObject
) -> None:
    choice = new_choice(byte_level, stops=("ab", "c"))
    num_drafted = 0
    for origins in rounds:
        text = data.draw(st.text("abcd", min_size=len(origins), max_size=len(origins)))
        drafts = 0 if origins[0] == "p" else 4
        choice.take(result(choice, ids_of(byte_level, text), origins, drafts), SPECULATING, now=2.0)
        num_drafted += drafts
        if choice.ended:
            break
    usage = choice.usage
    parts = usage.num_accepted + usage.num_bonus + usage.num_recovered + usage.num_plain
    assert usage.num_emitted == parts == choice.num_output
    assert usage.num_drafted == num_drafted
    records = said(choice).rounds
    assert usage.num_rounds == len(records)
    assert sum(record.num_emitted for record in records) == usage.num_emitted
    assert sum(record.num_accepted for record in records) == usage.num_accepted


def test_the_prompt_is_counted_with_the_first_choice_only(byte_level: Tokenizer) -> None:
    for n, counted in ((1, (3, 2)), (2, (0, 0))):
        choice = new_choice(byte_level, n=n)
        choice.take(result(choice, ids_of(byte_level, "a"), "p", num_cached_tokens=2), LEASED, now=2.0)
        assert (choice.usage.num_prompt_tokens, choice.usage.num_cached_tokens) == counted


def test_counts_go_on_over_a_failover(byte_level: Tokenizer) -> None:
    choice = new_choice(byte_level)
    ids = ids_of(byte_level, "ab")
    first = result(choice, ids[:1], "p", num_cached_tokens=2, num_preemptions=2)
    choice.take(first, LEASED, now=2.0)
    choice.moved("here:1", Reason.REPLICA_LOST)
    again = result(choice, ids[1:], "p", num_cached_tokens=3, num_preemptions=1)
    choice.take(again, LEASED, now=3.0)
    usage = choice.usage
    assert (usage.num_failovers, usage.num_preemptions, usage.num_cached_tokens) == (1, 3, 2)
    assert usage.num_emitted == 2


def test_a_replica_that_is_out_of_step_fails_the_choice_and_not_its_text(byte_level: Tokenizer) -> None:
    choice = new_choice(byte_level)
    ids = ids_of(byte_level, "ab")
    skipped = StepResult(1, len(PROMPT) + 2, (ids[1],), (Origin.PLAIN,))
    choice.take(skipped, LEASED, now=2.0)
    assert choice.error is not None
    assert choice.tokens == list(PROMPT)


def test_an_error_ends_a_choice_after_what_it_said(byte_level: Tokenizer) -> None:
    choice = new_choice(byte_level, stops=("##",))
    choice.take(result(choice, ids_of(byte_level, "a#"), "pp"), LEASED, now=2.0)
    choice.fail(NumericalError("NaN"))
    piece = said(choice)
    assert (piece.text, piece.finish_reason, piece.error) == ("a#", None, choice.error)
    assert piece.usage == choice.usage


def test_a_full_choice_tells_when_its_client_has_caught_up(byte_level: Tokenizer) -> None:
    choice = new_choice(byte_level)
    told = []
    (token,) = ids_of(byte_level, "a")
    for _ in range(MAX_BUFFERED_TOKENS):
        assert not choice.is_full
        choice.take(result(choice, [token], "p"), LEASED, now=2.0)
    assert choice.is_full
    choice.on_room = lambda: told.append(True)
    said(choice)
    assert not choice.is_full
    assert told == [True]


async def test_pieces_of_all_choices_come_until_all_have_ended(byte_level: Tokenizer) -> None:
    request = new_choice(byte_level, n=2).request
    a, b = ids_of(byte_level, "ab")
    first, second = request.choices
    first.take(result(first, [a], "p"), LEASED, now=2.0)
    second.take(result(second, [b], "p", finish_reason=FinishReason.LENGTH), LEASED, now=2.0)
    pieces = []
    async for piece in request.pieces():
        pieces.append((piece.choice, piece.text, piece.usage is not None))
        if len(pieces) == 2:
            first.take(result(first, [a], "p", finish_reason=FinishReason.STOP), LEASED, now=2.0)
    assert pieces == [(0, "a", False), (1, "b", True), (0, "a", True)]


@pytest.mark.parametrize(("min_tokens", "num_emitted"), [(1, 1), (2, 3), (3, 3)])
def test_stop_strings_before_min_tokens_do_not_end_a_choice(
    byte_level: Tokenizer, min_tokens: int, num_emitted: int
) -> None:
    choice = new_choice(byte_level, stops=("a",), min_tokens=min_tokens)
    choice.take(result(choice, ids_of(byte_level, "abab"), "pppp"), LEASED, now=2.0)
    assert choice.usage.num_emitted == num_emitted


@pytest.mark.parametrize("difference", [-1, 1])
def test_tokens_that_do_not_follow_what_is_here_end_a_choice(byte_level: Tokenizer, difference: int) -> None:
    choice = new_choice(byte_level)
    good = result(choice, ids_of(byte_level, "ab"), "pp")
    other = replace(good, committed_length=good.committed_length + difference)
    choice.take(other, LEASED, now=2.0)
    assert isinstance(choice.error, InternalError)
    assert choice.tokens == list(PROMPT)


def test_a_choices_figures_do_not_time_the_round_that_takes_in_the_prompt(byte_level: Tokenizer) -> None:
    choice = new_choice(byte_level)
    (token,) = ids_of(byte_level, "a")
    for now in (9.0, 2.0):
        choice.take(result(choice, [token], "p"), LEASED, now=now)
    choice.moved("here:1", Reason.REPLICA_LOST)
    choice.take(result(choice, [token], "p"), LEASED, now=9.0)
    (figures,) = choice.figures.report()
    assert (figures.num_rounds, figures.num_timed, figures.seconds) == (3, 1, 1.0)


# When pieces are said


async def test_the_first_piece_is_said_at_once_and_the_next_gathers_until_its_time_or_the_end(
    smollm2: Tokenizer,
) -> None:
    choice = new_choice(smollm2)
    request = choice.request
    request._pause = lambda: 3600.0
    ids = ids_of(smollm2, "abcd")
    pieces = request.pieces()
    choice.take(result(choice, ids[:1], "p"), LEASED, now=2.0)
    assert (await anext(pieces)).text == "a"
    second = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0)
    choice.take(result(choice, ids[1:3], "pp"), LEASED, now=3.0)
    await asyncio.sleep(0)
    assert not second.done()
    choice.take(result(choice, ids[3:], "p", finish_reason=FinishReason.LENGTH), LEASED, now=4.0)
    last = await second
    assert (last.text, last.finish_reason) == ("bcd", FinishReason.LENGTH)


async def test_what_was_gathered_is_said_when_its_time_has_come(smollm2: Tokenizer) -> None:
    choice = new_choice(smollm2)
    request = choice.request
    request._pause = lambda: 0.02
    ids = ids_of(smollm2, "abc")
    pieces = request.pieces()
    choice.take(result(choice, ids[:1], "p"), LEASED, now=2.0)
    assert (await anext(pieces)).text == "a"
    second = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0)
    for token_id in ids[1:]:
        choice.take(result(choice, [token_id], "p"), LEASED, now=3.0)
    assert not second.done()
    assert (await asyncio.wait_for(second, 30)).text == "bc"
