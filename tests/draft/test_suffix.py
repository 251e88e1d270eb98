"""The suffix drafter: its index against brute force, its memory's bounds, and what it may draft from."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafting import SequenceKey
from draft_service.suffix import SuffixDrafter
from draft_service.suffix_index import OutputMemory, RunChains, SuffixIndex, SuffixOptions
from specdecode.types import DrafterKind, Method, OpenDraft, Propose, SamplingParams

SALT, CLASS = b"tenant", "chat"
NAMESPACE = (SALT, CLASS)
EVERYTHING = 10**6
BOUNDLESS = SuffixOptions(trust=1e9)

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def chains_of(tokens: Sequence[int], run: int) -> RunChains:
    chains = RunChains(run)
    chains.tokens.extend(tokens)
    chains.index(len(tokens))
    return chains


def brute_force(tokens: Sequence[int], run: Sequence[int]) -> list[int]:
    size = len(run)
    return [end for end in range(len(tokens), size - 1, -1) if list(tokens[end - size : end]) == list(run)]


@given(tokens=TEXTS, run=st.lists(st.integers(0, 3), min_size=2, max_size=3))
def test_every_end_of_a_run_is_found_the_newest_first(tokens: list[int], run: list[int]) -> None:
    assert list(chains_of(tokens, len(run)).ends(array("I", run), EVERYTHING)) == brute_force(tokens, run)


def test_growing_loses_no_end() -> None:
    chance = random.Random(3)
    tokens = [chance.randrange(12) for _ in range(20_000)]
    chains = RunChains(3)
    chains.tokens.extend(tokens)
    while chains.num_indexed < len(tokens):
        chains.index(min(chance.randrange(1, 3000), len(tokens) - chains.num_indexed))
    for run in ([1, 2, 3], [11, 0, 11], tokens[-3:]):
        assert list(chains.ends(array("I", run), EVERYTHING)) == brute_force(tokens, run)


@given(data=st.data())
def test_what_is_taken_back_leaves_no_trace(data: st.DataObject) -> None:
    index = SuffixIndex(SuffixOptions(), OutputMemory(0), NAMESPACE)
    text: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(0, len(text)))
        more = data.draw(TEXTS)
        index.truncate(length)
        index.extend(more)
        text = text[:length] + more
        index.catch_up(data.draw(st.integers(0, 80)))
    index.catch_up(EVERYTHING)
    fresh = SuffixIndex(SuffixOptions(), OutputMemory(0), NAMESPACE)
    fresh.extend(text)
    fresh.catch_up(EVERYTHING)
    assert list(index.tokens) == text
    assert index.propose(8) == fresh.propose(8)


def proposed(text: Sequence[int], *outputs: Sequence[int], options: SuffixOptions = BOUNDLESS) -> list[int]:
    """Eight tokens at most after `text`, with these outputs remembered."""
    memory = OutputMemory(EVERYTHING)
    for output in outputs:
        memory.remember(NAMESPACE, output)
    index = SuffixIndex(options, memory, NAMESPACE)
    index.extend(text)
    index.catch_up(EVERYTHING)
    return index.propose(8)


class TestPropose:
    def test_nothing_that_did_not_occur(self) -> None:
        assert proposed([1, 2, 3, 4, 5]) == []
        assert proposed([1, 2]) == []

    def test_the_text_goes_on_as_it_did_and_around_its_end(self) -> None:
        assert proposed([7, 1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6, 1, 2, 3, 4, 5]

    def test_outputs_of_others_are_followed_to_their_end(self) -> None:
        assert proposed([9, 1, 2, 3], [1, 2, 3, 4, 5]) == [4, 5]
        assert proposed([9, 1, 2, 3], [1, 2, 3, 4, 5], [8, 8, 8, 8]) == [4, 5]

    def test_the_most_frequent_continuation_wins(self) -> None:
        outputs = [[1, 2, 3, 4, 4], [1, 2, 3, 5, 6], [1, 2, 3, 5, 6]]
        assert proposed([9, 1, 2, 3], *outputs) == [5, 6]

    def test_a_longer_agreement_outweighs_frequent_short_ones(self) -> None:
        outputs = [[9, 8, 7, 1, 2, 3, 4, 4], [1, 2, 3, 5, 6], [1, 2, 3, 5, 6]]
        assert proposed([9, 8, 7, 1, 2, 3], *outputs)[0] == 4

    def test_a_draft_ends_where_its_votes_part(self) -> None:
        outputs = [[1, 2, 3, 4, token, 0] for token in (10, 11, 12, 13)]
        assert proposed([9, 1, 2, 3], *outputs) == [4]
        assert len(proposed([9, 1, 2, 3], *outputs, options=SuffixOptions(1e9, 0.1))) == 3

    def test_short_matches_are_not_followed_far(self) -> None:
        output = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert proposed([30, 1, 2, 3], output, options=SuffixOptions(1.0)) == [4, 5, 6]
        assert proposed([1, 2, 3, 4], output, options=SuffixOptions(0.5)) == [5, 6]


class TestMemory:
    def test_it_holds_its_capacity_and_forgets_the_oldest_first(self) -> None:
        memory = OutputMemory(4000)
        for number in range(50):
            memory.remember((SALT, str(number % 3)), [number] * 200)
        kept = {
            token for name in "012" for chains in memory.of((SALT, name)) for token in set(chains.tokens[:-1])
        }
        assert 49 in kept
        assert 0 not in kept
        held = sum(len(chains.tokens) for name in "012" for chains in memory.of((SALT, name)))
        assert 2000 <= held <= 4000

    def test_a_token_takes_at_most_64_bytes(self) -> None:
        chance = random.Random(1)
        memory = OutputMemory(300_000)
        for _ in range(400):
            memory.remember(NAMESPACE, [chance.randrange(49_152) for _ in range(1000)])
        held = sum(len(chains.tokens) for chains in memory.of(NAMESPACE))
        assert held >= 200_000
        assert memory.num_bytes <= 64 * held

    def test_many_namespaces_of_next_to_nothing_are_bounded_too(self) -> None:
        memory = OutputMemory(10_000)
        for number in range(2000):
            memory.remember((str(number).encode(), CLASS), range(5))
        held = sum(bool(memory.of((str(number).encode(), CLASS))) for number in range(2000))
        assert 100 <= held <= 160
        assert memory.num_bytes <= 64 * 10_000

    def test_a_capacity_of_next_to_nothing_holds_nothing(self) -> None:
        memory = OutputMemory(3)
        memory.remember(NAMESPACE, range(20_000))
        assert not memory.of(NAMESPACE)
        assert memory.num_bytes == 0

    def test_namespaces_that_are_forgotten_leave_nothing(self) -> None:
        memory = OutputMemory(400)
        for number in range(1000):
            memory.remember((SALT, str(number)), range(50))
        assert sum(bool(memory.of((SALT, str(number)))) for number in range(1000)) <= 8
        assert len(memory._newest_first) <= 8


def order(sequence: int, tokens: Sequence[int], **changes: object) -> OpenDraft:
    given = {"cache_salt": SALT, "traffic_class": CLASS, **changes}
    return OpenDraft(
        sequence, tuple(tokens), 3, SamplingParams(), Method.REJECTION, DrafterKind.SUFFIX, **given
    )


def draft_after(drafter: SuffixDrafter, opened: OpenDraft) -> tuple[int, ...]:
    sequence = drafter.open(SequenceKey(0, opened.sequence), opened)
    sequence.propose(Propose(opened.sequence, len(opened.token_ids), (), 4))
    (answer,) = drafter.advance()
    sequence.close()
    return answer.draft.token_ids


FIRST = (1, 2, 3, 11, 12, 13, 14, 15, 16)
SECOND = (1, 2, 3, 11, 12, 13)


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ({}, {}, True),
        ({"remembers_output": False}, {}, False),
        ({}, {"remembers_output": False}, True),
        ({}, {"cache_salt": b"another"}, False),
        ({}, {"traffic_class": "code"}, False),
    ],
    ids=["same", "opted out", "reader opted out", "another tenant", "another class"],
)
def test_who_may_be_drafted_for_from_an_output(
    first: dict[str, object], second: dict[str, object], found: bool
) -> None:
    drafter = SuffixDrafter(SuffixOptions(), 10_000)
    assert draft_after(drafter, order(1, FIRST, **first)) == ()
    assert bool(draft_after(drafter, order(2, SECOND, **second))) is found


def test_prompts_are_not_remembered() -> None:
    drafter = SuffixDrafter(SuffixOptions(), 10_000)
    prompt_only = replace(order(1, FIRST), num_prompt_tokens=len(FIRST))
    assert draft_after(drafter, prompt_only) == ()
    assert draft_after(drafter, order(2, SECOND)) == ()


def test_separators_are_never_proposed() -> None:
    memory = OutputMemory(EVERYTHING)
    memory.remember(NAMESPACE, [1, 2, 3, 4])
    memory.remember(NAMESPACE, [1, 2, 3, 4])
    index = SuffixIndex(SuffixOptions(1e9, 0.0), memory, NAMESPACE)
    index.extend(array("I", [9, 1, 2, 3]))
    index.catch_up(EVERYTHING)
    assert index.propose(8) == [4]
