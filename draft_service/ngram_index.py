"""Prompt lookup: the text so far predicts its own continuation.

The last n tokens are looked for earlier in prompt + output, longest n first; what followed there is
proposed. A copy that reaches the end of the text goes on with what it has itself proposed, as in LZ77:
"abcabc" continues "abcabc…", so text that repeats with any period fills the whole draft.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

_TOKEN_BITS = 32


class MatchChoice(Enum):
    """Which of several equal n-grams is copied from."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True)
class NgramOptions:
    """How to look up: `size_min` ≤ n ≤ `size_max` tokens have to match.

    `trust`: tokens proposed for each token before the match that agrees with the text's end, also beyond
    `size_max`: what agrees over a few tokens by chance is not followed for long.
    """

    size_min: int = 2
    size_max: int = 4
    choice: MatchChoice = MatchChoice.LATEST
    trust: float = math.inf


@dataclass(frozen=True)
class NgramMatch:
    """The text's last `size` tokens also stand just before position `end`."""

    end: int
    size: int


class _Level:
    """All n-grams of one size, named by where they first ended.

    A key is (name of the n-gram without its last token, last token): exact, and of constant size for every n.

    Attributes:
        first: key → the n-gram's name, the smallest end.
        name: [end] name of the n-gram that ends there.
        latest: [name] its largest end.
        previous: [end] the largest smaller end of the same n-gram, to undo `latest`.
    """

    __slots__ = ("first", "latest", "name", "previous")

    def __init__(self, size: int) -> None:
        self.first: dict[int, int] = {}
        # Nothing ends before `size`.
        self.name = array("I", bytes(4 * size))
        self.latest = array("I", bytes(4 * size))
        self.previous = array("I", bytes(4 * size))

    def add(self, key: int, end: int) -> None:
        first = self.first.setdefault(key, end)
        self.name.append(first)
        self.latest.append(end)
        if first == end:
            self.previous.append(0)
        else:
            self.previous.append(self.latest[first])
            self.latest[first] = end

    def remove(self, key: int) -> None:
        """Takes back the last `add`."""
        first = self.name.pop()
        self.latest.pop()
        previous = self.previous.pop()
        if previous:
            self.latest[first] = previous
        else:
            del self.first[key]


class NgramIndex:
    """Where each n-gram of a text has ended, kept up to date token by token.

    The n-gram that ends the text is not indexed until another token follows it, so it never matches
    itself and every match has a continuation. Indexing or forgetting a token takes `size_max` dictionary
    accesses, a match at most `size_max - size_min + 1`, whatever the text's length; memory is at most
    `size_max` entries, of about 130 bytes, a token.

    Attributes:
        tokens: uint32, the text.
    """

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self.tokens = array("I")
        self._levels = [_Level(size) for size in range(1, options.size_max + 1)]
        self._num_indexed = 0  # ends 1 … _num_indexed are in the levels

    @property
    def num_waiting(self) -> int:
        """Tokens that `catch_up` has yet to index."""
        return max(len(self.tokens) - 1, 0) - self._num_indexed

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends to the text; `catch_up` indexes it."""
        self.tokens.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Forgets the text from position `length` on."""
        keep = max(length - 1, 0)
        for end in range(self._num_indexed, keep, -1):
            for size in range(min(end, len(self._levels)), 0, -1):
                self._levels[size - 1].remove(self._key(size, end))
        self._num_indexed = min(self._num_indexed, keep)
        del self.tokens[length:]

    def catch_up(self, limit: int) -> int:
        """Indexes at most `limit` tokens that wait; returns how many."""
        count = min(limit, self.num_waiting)
        for end in range(self._num_indexed + 1, self._num_indexed + count + 1):
            for size in range(1, min(end, len(self._levels)) + 1):
                self._levels[size - 1].add(self._key(size, end), end)
        self._num_indexed += count
        return count

    def match(self) -> NgramMatch | None:
        """Where the longest known suffix of the text has ended before; everything must be indexed."""
        assert self.num_waiting == 0
        length = len(self.tokens)
        for size in range(min(self.options.size_max, length), self.options.size_min - 1, -1):
            level = self._levels[size - 1]
            first = level.first.get(self._key(size, length))
            if first is not None:
                earliest = self.options.choice is MatchChoice.EARLIEST
                return NgramMatch(first if earliest else level.latest[first], size)
        return None

    def propose(self, num_tokens: int) -> list[int]:
        """What followed the match, going round from the text's end, as far as it is trusted; empty without a
        match.
        """
        match = self.match()
        if match is None:
            return []
        if self.options.trust < math.inf:
            agreeing = self._agreement(match, math.ceil(num_tokens / self.options.trust))
            num_tokens = min(num_tokens, max(int(agreeing * self.options.trust), 1))
        period = len(self.tokens) - match.end
        return [self.tokens[match.end + i % period] for i in range(num_tokens)]

    def _agreement(self, match: NgramMatch, most: int) -> int:
        """How many tokens before the match are those that end the text, up to `most`."""
        tokens = self.tokens
        count = match.size
        while count < min(most, match.end) and tokens[match.end - 1 - count] == tokens[-1 - count]:
            count += 1
        return count

    def _key(self, size: int, end: int) -> int:
        shorter = self._levels[size - 2].name[end - 1] if size > 1 else 0
        return shorter << _TOKEN_BITS | self.tokens[end - 1]
