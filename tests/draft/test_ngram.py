"""The n-gram index against a scan of the whole text, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafting import SequenceKey
from draft_service.lookup import TOKENS_PER_TURN, NgramDrafter
from draft_service.ngram_index import MatchChoice, NgramIndex, NgramMatch, NgramOptions
from specdecode.types import Draft, DrafterKind, Method, OpenDraft, Propose, SamplingParams

UNLIMITED = 2**31


def scanned_match(text: Sequence[int], options: NgramOptions) -> NgramMatch | None:
    """The definition: the longest suffix that also ends earlier, at the earliest or latest such end."""
    for size in range(options.size_max, options.size_min - 1, -1):
        suffix = text[len(text) - size :]
        ends = [end for end in range(size, len(text)) if text[end - size : end] == suffix]
        if size <= len(text) and ends:
            return NgramMatch(min(ends) if options.choice is MatchChoice.EARLIEST else max(ends), size)
    return None


def copied(text: list[int], match: NgramMatch | None, num_tokens: int) -> list[int]:
    """The definition of a copy that may run into itself: token by token, onto the end of the text."""
    if match is None:
        return []
    extended = list(text)
    for offset in range(num_tokens):
        extended.append(extended[match.end + offset])
    return extended[len(text) :]


def index_of(text: Sequence[int], options: NgramOptions) -> NgramIndex:
    index = NgramIndex(options)
    index.extend(text)
    index.catch_up(UNLIMITED)
    return index


all_options = st.builds(
    lambda low, extra, choice: NgramOptions(low, low + extra, choice),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(MatchChoice),
)
tokens = st.lists(st.integers(0, 2), max_size=12)
edits = st.lists(st.tuples(st.integers(0, 20), tokens), max_size=20)


@given(all_options, tokens, edits)
def test_match_equals_a_scan_after_any_appends_and_truncations(
    options: NgramOptions, start: list[int], edits: list[tuple[int, list[int]]]
) -> None:
    text = list(start)
    index = index_of(text, options)
    for cut, appended in edits:
        # Index only a part first, so that texts are also cut while tokens wait.
        text = text[: len(text) - cut] if cut < len(text) else []
        index.truncate(len(text))
        text += appended
        index.extend(appended)
        index.catch_up(3)
        if len(appended) % 2:
            index.catch_up(UNLIMITED)
            match = scanned_match(text, options)
            assert index.match() == match
            assert index.propose(9) == copied(text, match, 9)
    index.catch_up(UNLIMITED)
    assert index.tokens.tolist() == text
    assert index.match() == scanned_match(text, options)


@given(all_options, tokens, tokens)
def test_truncation_leaves_nothing_behind(options: NgramOptions, kept: list[int], cut: list[int]) -> None:
    index = index_of(kept + cut, options)
    index.truncate(len(kept))
    fresh = index_of(kept, options)
    for level, expected in zip(index._levels, fresh._levels, strict=True):
        assert level.first == expected.first
        assert level.name == expected.name
        assert level.previous == expected.previous
        assert [level.latest[name] for name in level.first.values()] == [
            expected.latest[name] for name in expected.first.values()
        ]


@pytest.mark.parametrize(
    ("text", "choice", "expected"),
    [
        pytest.param([], MatchChoice.LATEST, [], id="empty"),
        pytest.param([7, 8], MatchChoice.LATEST, [], id="the suffix is not its own match"),
        pytest.param([1, 2, 3, 9, 1, 2], MatchChoice.LATEST, [3, 9, 1, 2, 3], id="runs into the suffix"),
        pytest.param([5, 5, 5], MatchChoice.LATEST, [5, 5, 5, 5, 5], id="period 1"),
        pytest.param([1, 2, 1, 2], MatchChoice.LATEST, [1, 2, 1, 2, 1], id="period 2"),
        pytest.param([1, 2, 3, 1, 2, 4, 1, 2], MatchChoice.EARLIEST, [3, 1, 2, 4, 1], id="earliest"),
        pytest.param([1, 2, 3, 1, 2, 4, 1, 2], MatchChoice.LATEST, [4, 1, 2, 4, 1], id="latest"),
        pytest.param([1, 2, 3, 4, 2, 3, 5, 1, 2, 3], MatchChoice.LATEST, [4, 2, 3, 5, 1], id="longest first"),
    ],
)
def test_literal_proposals(text: list[int], choice: MatchChoice, expected: list[int]) -> None:
    assert index_of(text, NgramOptions(2, 4, choice)).propose(5) == expected


@pytest.mark.parametrize(
    ("text", "trust", "expected"),
    [
        pytest.param([1, 2, 3, 4, 5, 6, 7, 9, 1, 2], 1.0, [3, 4], id="as many as agree"),
        pytest.param([1, 2, 3, 4, 5, 6, 7, 9, 1, 2], 1.5, [3, 4, 5], id="half as many more"),
        pytest.param([1, 2, 3, 4, 5, 6, 7, 9, 1, 2], 0.1, [3], id="one at least"),
        pytest.param([*range(20), *range(10)], 0.5, [10, 11, 12, 13, 14], id="beyond the longest n-gram"),
        pytest.param([*range(20), *range(10)], 1.5, [*range(10, 18)], id="never more than asked for"),
        pytest.param([1, 2, 1, 2], 1.0, [1, 2], id="the text's start ends it"),
        pytest.param([7, 8], 1.0, [], id="no match"),
    ],
)
def test_a_match_is_followed_as_far_as_what_precedes_it_agrees(
    text: list[int], trust: float, expected: list[int]
) -> None:
    assert index_of(text, NgramOptions(2, 4, MatchChoice.LATEST, trust)).propose(8) == expected


@given(all_options, tokens, st.floats(0.1, 10))
def test_trust_only_shortens(options: NgramOptions, text: list[int], trust: float) -> None:
    whole = index_of(text, options).propose(8)
    trusted = index_of(text, replace(options, trust=trust)).propose(8)
    assert trusted == whole[: len(trusted)]
    assert bool(trusted) == bool(whole)


class CountingDict(dict[int, int]):
    """Counts every access to an entry."""

    accesses = 0

    def get(self, *args: int) -> int | None:  # type: ignore[override]
        CountingDict.accesses += 1
        return super().get(*args)

    def setdefault(self, *args: int) -> int:  # type: ignore[override]
        CountingDict.accesses += 1
        return super().setdefault(*args)

    def __delitem__(self, key: int) -> None:
        CountingDict.accesses += 1
        super().__delitem__(key)

    def __iter__(self) -> None:  # type: ignore[override]
        raise AssertionError("the index is scanned")

    keys = values = items = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize("length", [100, 100_000])
@pytest.mark.parametrize("period", [7, 100_000])
def test_work_for_a_token_does_not_depend_on_the_length_of_the_text(length: int, period: int) -> None:
    options = NgramOptions(2, 5)
    index = NgramIndex(options)
    for level in index._levels:
        level.first = CountingDict()
    index.extend(position % period for position in range(length))
    index.catch_up(UNLIMITED)
    CountingDict.accesses = 0

    for _ in range(10):
        index.extend([1, 2, 3])
        index.catch_up(UNLIMITED)
        index.propose(8)
        index.truncate(len(index.tokens) - 2)
        index.extend([4])
        index.catch_up(UNLIMITED)
        index.propose(8)

    indexed, forgotten, matched = 10 * 4, 10 * 2, 10 * 2
    most = (indexed + forgotten) * options.size_max + matched * (options.size_max - options.size_min + 1)
    assert CountingDict.accesses <= most


def test_memory_is_bounded_by_entries_a_token() -> None:
    options = NgramOptions(2, 5)
    index = index_of(range(5_000), options)
    assert sum(len(level.first) for level in index._levels) <= options.size_max * 5_000
    assert all(
        len(level.name) == len(level.latest) == len(level.previous) == 5_000 for level in index._levels
    )


def open_draft(
    sequence: int, token_ids: Sequence[int], stop_ids: tuple[int, ...] = (), method: Method = Method.GREEDY
) -> OpenDraft:
    sampling = SamplingParams(stop_token_ids=stop_ids)
    return OpenDraft(sequence, tuple(token_ids), 1, sampling, method, DrafterKind.NGRAM)


def drafts_of(drafter: NgramDrafter) -> list[Draft]:
    drafts = []
    while drafter.busy:
        drafts += [answer.draft for answer in drafter.advance()]
    return drafts


def test_nothing_is_proposed_after_a_stop_id() -> None:
    drafter = NgramDrafter(NgramOptions())
    sequence = drafter.open(SequenceKey(0, 1), open_draft(1, [1, 2, 3, 9, 4, 1, 2], stop_ids=(9,)))
    sequence.propose(Propose(1, 7, (), 8))
    (draft,) = drafts_of(drafter)
    assert draft.token_ids == (3, 9)


@pytest.mark.parametrize("method", Method)
def test_proposals_are_one_hot(method: Method) -> None:
    drafter = NgramDrafter(NgramOptions())
    drafter.open(SequenceKey(0, 1), open_draft(1, [1, 2, 1, 2], method=method)).propose(Propose(1, 4, (), 3))
    (draft,) = drafts_of(drafter)
    assert (draft.token_ids, draft.q) == ((1, 2, 1), None)


def test_committed_tokens_replace_what_they_contradict() -> None:
    drafter = NgramDrafter(NgramOptions())
    sequence = drafter.open(SequenceKey(0, 1), open_draft(1, [1, 2, 3, 1, 2]))
    for order, expected in [
        (Propose(1, 5, (), 2), (3, 1)),
        (Propose(1, 5, (3,), 2), (1, 2)),
        (Propose(1, 4, (2, 7, 1, 2), 2), (7, 1)),  # 3 is taken back
        (Propose(1, 2, (), 2), ()),  # only 1, 2 are left
    ]:
        sequence.propose(order)
        (draft,) = drafts_of(drafter)
        assert (draft.committed_length, draft.token_ids) == (order.committed_length, expected)


def test_a_long_prompt_does_not_hold_up_other_sequences() -> None:
    drafter = NgramDrafter(NgramOptions())
    long = drafter.open(SequenceKey(0, 1), open_draft(1, range(5 * TOKENS_PER_TURN)))
    long.propose(Propose(1, 5 * TOKENS_PER_TURN, (1, 2), 4))
    short = drafter.open(SequenceKey(0, 2), open_draft(2, [1, 2, 1, 2]))
    short.propose(Propose(2, 4, (), 4))
    assert [answer.draft.sequence for answer in drafter.advance()] == [2]
    (draft,) = drafts_of(drafter)
    assert (draft.sequence, draft.token_ids) == (1, (3, 4, 5, 6))


def test_a_closed_sequence_is_not_answered() -> None:
    drafter = NgramDrafter(NgramOptions())
    sequence = drafter.open(SequenceKey(0, 1), open_draft(1, [1, 2, 1, 2]))
    sequence.propose(Propose(1, 4, (), 4))
    sequence.close()
    assert drafts_of(drafter) == []
