"""What a drafter is to the loop that drives it.

Drafters, their sequences and everything below them belong to the loop's one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specdecode.errors import SpecdecodeError
from specdecode.types import Draft, OpenDraft, Propose


@dataclass(frozen=True)
class SequenceKey:
    """Names a sequence: the number is unique within the stream only."""

    stream: int
    sequence: int


@dataclass(frozen=True)
class Answer:
    """A draft, and whose it is."""

    key: SequenceKey
    draft: Draft


class DraftSequence(Protocol):
    """One sequence as its drafter keeps it."""

    @property
    def committed_length(self) -> int:
        """Committed tokens known."""

    def propose(self, order: Propose) -> None:
        """Takes the committed tokens and asks for a draft after them, which `Drafter.advance` answers, once.

        The committed tokens become those before `from_length`, which must be known, followed by the
        order's; what was known or drafted beyond the common prefix is forgotten, and a draft that still
        waits is taken back.

        Raises:
            InvalidArgumentError: tokens this drafter can't have seen; nothing changed.
        """

    def close(self) -> None:
        """Frees everything."""


class Drafter(Protocol):
    """Drafts for many sequences at once, a bounded piece of work at a time."""

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""

    def open(self, key: SequenceKey, order: OpenDraft) -> DraftSequence:
        """Starts a sequence.

        Raises:
            InvalidArgumentError: tokens this drafter can't have seen.
        """

    def advance(self) -> list[Answer]:
        """Does the next piece of work for everyone who waits; returns the drafts that it completed."""

    def abandon(self, error: SpecdecodeError) -> list[Answer]:
        """Answers every draft that waits with `error`, after `advance` failed in a way it does not know."""
