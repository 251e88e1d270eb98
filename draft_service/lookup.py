"""Drafters that look up: one index a sequence, indexed a bounded number of tokens at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from draft_service.drafting import Answer, SequenceKey
from draft_service.ngram_index import NgramIndex, NgramOptions
from specdecode.errors import SpecdecodeError
from specdecode.types import Draft, OpenDraft, Propose

TOKENS_PER_TURN: Final = 8192
"""About 20 ms of indexing, so that a long prompt never holds up the others' drafts for longer."""


class LookupIndex(Protocol):
    """A text and where parts of it occurred before."""

    @property
    def tokens(self) -> array[int]:
        """uint32, the text."""

    @property
    def num_waiting(self) -> int:
        """Tokens that `catch_up` has yet to index."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends to the text."""

    def truncate(self, length: int) -> None:
        """Forgets the text from position `length` on."""

    def catch_up(self, limit: int) -> int:
        """Indexes at most `limit` tokens that wait; returns how many."""

    def propose(self, num_tokens: int) -> list[int]:
        """What may follow, at most `num_tokens`; everything must be indexed."""


class LookupSequence:
    """A sequence and its index."""

    def __init__(
        self, drafter: LookupDrafter, key: SequenceKey, order: OpenDraft, index: LookupIndex
    ) -> None:
        self.key = key
        self.index = index
        self.index.extend(order.token_ids)
        self.stop_ids = frozenset(order.sampling.stop_token_ids)
        self.num_draft_tokens = 0
        self.asked_at: float | None = None
        self._drafter = drafter

    @property
    def committed_length(self) -> int:
        """Committed tokens known."""
        return len(self.index.tokens)

    def propose(self, order: Propose) -> None:
        """Takes the committed tokens and asks for a draft."""
        known = self.index.tokens[order.from_length :]
        same = common_prefix(known, order.token_ids)
        if same < len(known):
            self.index.truncate(order.from_length + same)
        self.index.extend(order.token_ids[same:])
        self.num_draft_tokens = order.num_draft_tokens
        self.asked_at = time.perf_counter()
        self._drafter.enqueue(self)

    def close(self) -> None:
        """Frees everything."""
        self._drafter.dequeue(self)

    def answer(self, asked_at: float) -> Answer:
        """The draft asked for at `asked_at`; everything must be indexed."""
        self.asked_at = None
        token_ids = through_stop(self.index.propose(self.num_draft_tokens), self.stop_ids)
        seconds = time.perf_counter() - asked_at
        draft = Draft(self.key.sequence, self.committed_length, tuple(token_ids), seconds=seconds)
        return Answer(self.key, draft)

    def fail(self, error: SpecdecodeError) -> Answer:
        """The error in place of the draft asked for."""
        self.asked_at = None
        return Answer(self.key, Draft(self.key.sequence, self.committed_length, error=error))


class LookupDrafter(ABC):
    """Looks up for many sequences.

    A sequence is indexed from when it is opened, ahead of the first Propose.
    """

    def __init__(self) -> None:
        self._waiting: dict[SequenceKey, LookupSequence] = {}

    @abstractmethod
    def start(self, key: SequenceKey, order: OpenDraft) -> LookupSequence:
        """A sequence with an index of this drafter's kind."""

    @property
    def busy(self) -> bool:
        """Whether someone waits."""
        return bool(self._waiting)

    def open(self, key: SequenceKey, order: OpenDraft) -> LookupSequence:
        """Starts a sequence."""
        sequence = self.start(key, order)
        self.enqueue(sequence)
        return sequence

    def enqueue(self, sequence: LookupSequence) -> None:
        """Work on `sequence` at the next turn."""
        self._waiting[sequence.key] = sequence

    def dequeue(self, sequence: LookupSequence) -> None:
        """No more work on `sequence`."""
        self._waiting.pop(sequence.key, None)

    def advance(self) -> list[Answer]:
        """Indexes up to `TOKENS_PER_TURN` tokens, shortest backlog first; answers who is up to date."""
        answers = []
        budget = TOKENS_PER_TURN
        for sequence in sorted(self._waiting.values(), key=lambda sequence: sequence.index.num_waiting):
            budget -= sequence.index.catch_up(budget)
            if sequence.index.num_waiting:
                break
            self.dequeue(sequence)
            if sequence.asked_at is not None:
                answers.append(sequence.answer(sequence.asked_at))
        return answers

    def abandon(self, error: SpecdecodeError) -> list[Answer]:
        """Answers every draft that waits with `error`."""
        asked = [sequence for sequence in self._waiting.values() if sequence.asked_at is not None]
        self._waiting.clear()
        return [sequence.fail(error) for sequence in asked]


class NgramDrafter(LookupDrafter):
    """Prompt lookup for many sequences (`specdecode.types.DrafterKind.NGRAM`)."""

    def __init__(self, options: NgramOptions) -> None:
        super().__init__()
        self.options = options

    def start(self, key: SequenceKey, order: OpenDraft) -> LookupSequence:
        """A sequence that looks up in its own text."""
        return LookupSequence(self, key, order, NgramIndex(self.options))


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of equal tokens at the start of both."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def through_stop(token_ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    """`token_ids` up to and including the first stop id: nothing after it can be kept."""
    for index, token in enumerate(token_ids):
        if token in stop_ids:
            return token_ids[: index + 1]
    return token_ids
