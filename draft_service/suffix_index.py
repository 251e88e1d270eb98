"""Suffix look-up: where the text's end occurred before, in this text and in others, and what followed there.

Runs of two or three tokens are kept in hash chains as for LZ77 (the layout is zlib's): for each run where it
last ended, for each end where its bucket's run ended before. A look-up walks the newest ends of the text's
last run, measures how far each agrees with the text backwards, and lets them vote on every next token, the
longer the agreement the heavier: the frequency weighting of suffix decoding (Oliaro et al. 2024) without its
tree, in 12 to 16 bytes a token.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from draft_service.lookup import TOKENS_PER_TURN

OWN_RUN = 2
"""Tokens that have to match within the text."""
MEMORY_RUN = 3
"""Tokens that have to match in the memory, where two occur by chance too often."""
MOST_CANDIDATES = 16
"""Earlier ends that are looked at, the newest first."""
LONGEST_AGREEMENT = 16
"""Tokens beyond which a longer match says no more."""
_SEPARATOR = 2**32 - 1
_FIRST_BUCKETS = 64
_GENERATIONS = 4


@dataclass(frozen=True)
class SuffixOptions:
    """How far a look-up is followed.

    Attributes:
        trust: tokens proposed for each one that agrees before the best match.
        least_survival: a draft ends before the token whose share of all votes, times those of the tokens
            before it, is below.
    """

    trust: float = 1.5
    least_survival: float = 0.3


class RunChains:
    """A text and where each of its runs ended.

    Attributes:
        run: tokens of a run, 2 or 3.
        tokens: uint32, the text.
    """

    __slots__ = ("_buckets", "_mask", "_previous", "run", "tokens")

    def __init__(self, run: int) -> None:
        self.run = run
        self.tokens = array("I")
        # [end] the end before it in the same bucket; 0: none.
        self._previous = array("I", [0])
        self._mask = _FIRST_BUCKETS - 1
        self._buckets = array("I", bytes(4 * _FIRST_BUCKETS))

    @property
    def num_indexed(self) -> int:
        """Tokens whose runs can be found."""
        return len(self._previous) - 1

    @property
    def num_bytes(self) -> int:
        """Memory."""
        return 4 * (len(self.tokens) + len(self._previous) + len(self._buckets))

    def index(self, count: int) -> None:
        """Makes the runs that end with the next `count` tokens findable."""
        if self.num_indexed + count > len(self._buckets):
            self._grow(self.num_indexed + count)
        tokens, previous, buckets, mask = self.tokens, self._previous, self._buckets, self._mask
        run = self.run
        for end in range(len(previous), len(previous) + count):
            if end < run:
                previous.append(0)
                continue
            bucket = _hash(tokens, end, run) & mask
            previous.append(buckets[bucket])
            buckets[bucket] = end

    def forget(self, length: int) -> None:
        """Takes back the text from position `length` on."""
        tokens, previous = self.tokens, self._previous
        for end in range(self.num_indexed, length, -1):
            before = previous.pop()
            if end >= self.run:
                self._buckets[_hash(tokens, end, self.run) & self._mask] = before
        del tokens[length:]

    def ends(self, text: array[int], most: int) -> Iterator[int]:
        """Where the run that ends `text` ended, the newest first; looks at `most` ends."""
        length, run = len(text), self.run
        if length < run:
            return
        tokens, previous = self.tokens, self._previous
        last = text[length - run :]
        end = self._buckets[_hash(text, length, run) & self._mask]
        while end and most:
            if tokens[end - run : end] == last:
                yield end
            end = previous[end]
            most -= 1

    def _grow(self, size: int) -> None:
        """At least a bucket a token."""
        buckets = len(self._buckets)
        while buckets < size:
            buckets *= 2
        self._mask, self._buckets = buckets - 1, array("I", bytes(4 * buckets))
        count, self._previous = self.num_indexed, array("I", [0])
        self.index(count)


def _hash(tokens: array[int], end: int, run: int) -> int:
    """Of the run that ends there."""
    mixed = tokens[end - 2] * 0x85EBCA6B ^ tokens[end - 1] * 0xC2B2AE35
    return (mixed if run == OWN_RUN else mixed ^ tokens[end - 3] * 0x9E3779B1) >> 7


class OutputMemory:
    """What was put out lately, apart for each namespace; the oldest is forgotten.

    Args:
        capacity: tokens of all namespaces together; one that holds next to nothing counts as what it takes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._num_tokens = 0
        # In the order in which they were begun.
        self._generations: OrderedDict[RunChains, tuple[bytes, str]] = OrderedDict()
        self._newest_first: dict[tuple[bytes, str], list[RunChains]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory."""
        return sum(chains.num_bytes for chains in self._generations)

    def of(self, namespace: tuple[bytes, str]) -> Sequence[RunChains]:
        """The texts of a namespace, the newest first."""
        return self._newest_first.get(namespace, ())

    def remember(self, namespace: tuple[bytes, str], output: Sequence[int]) -> None:
        """Adds an output's end, as much as is indexed in one turn."""
        most = min(TOKENS_PER_TURN, self.capacity // _GENERATIONS)
        kept = array("I", output[max(len(output) - most, 0) :])
        if len(kept) <= MEMORY_RUN:
            return
        chains = self._open_generation(namespace)
        self._num_tokens -= _size(chains)
        kept.append(_SEPARATOR)
        chains.tokens.extend(kept)
        chains.index(len(kept))
        self._num_tokens += _size(chains)
        while self._num_tokens > self.capacity:
            self._drop_oldest()

    def _open_generation(self, namespace: tuple[bytes, str]) -> RunChains:
        generations = self._newest_first.setdefault(namespace, [])
        if not generations or len(generations[0].tokens) >= self.capacity // _GENERATIONS:
            generations.insert(0, RunChains(MEMORY_RUN))
            self._generations[generations[0]] = namespace
            self._num_tokens += _size(generations[0])
        return generations[0]

    def _drop_oldest(self) -> None:
        chains, namespace = self._generations.popitem(last=False)
        self._newest_first[namespace].remove(chains)
        if not self._newest_first[namespace]:
            del self._newest_first[namespace]
        self._num_tokens -= _size(chains)


def _size(chains: RunChains) -> int:
    """Tokens that a generation counts as: clients choose namespaces, and an empty one takes memory, too."""
    return max(len(chains.tokens), _FIRST_BUCKETS)


@dataclass(frozen=True)
class _Candidate:
    """An earlier end of the text's last tokens.

    Attributes:
        weight: of its vote.
    """

    tokens: array[int]
    end: int
    weight: float
    is_own: bool

    def following(self, index: int, draft: Sequence[int]) -> int:
        """The token that followed; at the end of the text itself a copy goes on with the draft."""
        position = self.end + index
        if position < len(self.tokens):
            return self.tokens[position]
        return draft[position - len(self.tokens)] if self.is_own else _SEPARATOR


class SuffixIndex:
    """A text, looked up in itself and in a memory of outputs.

    As with `NgramIndex` the run that ends the text is not indexed until another token follows it.

    Attributes:
        tokens: uint32, the text.
    """

    def __init__(self, options: SuffixOptions, memory: OutputMemory, namespace: tuple[bytes, str]) -> None:
        self.options = options
        self._own = RunChains(OWN_RUN)
        self._memory = memory
        self._namespace = namespace

    @property
    def tokens(self) -> array[int]:
        """The text."""
        return self._own.tokens

    @property
    def num_waiting(self) -> int:
        """Tokens that `catch_up` has yet to index."""
        return max(len(self.tokens) - 1, 0) - self._own.num_indexed

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends to the text; `catch_up` indexes it."""
        self.tokens.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Forgets the text from position `length` on."""
        last = self.tokens[length - 1] if length else 0
        self._own.forget(max(length - 1, 0))
        if length:
            self.tokens.append(last)

    def catch_up(self, limit: int) -> int:
        """Indexes at most `limit` tokens that wait; returns how many."""
        count = min(limit, self.num_waiting)
        self._own.index(count)
        return count

    def propose(self, num_tokens: int) -> list[int]:
        """What followed most where the text's end occurred, as far as it is trusted; empty if nowhere."""
        candidates, agreement = self._candidates()
        if not candidates:
            return []
        num_tokens = min(num_tokens, max(int(agreement * self.options.trust), 1))
        draft: list[int] = []
        survival = 1.0
        while len(draft) < num_tokens and candidates:
            votes: dict[int, float] = {}
            said = [candidate.following(len(draft), draft) for candidate in candidates]
            for token, candidate in zip(said, candidates, strict=True):
                votes[token] = votes.get(token, 0.0) + candidate.weight
            total = sum(votes.values())
            votes.pop(_SEPARATOR, None)
            if not votes:
                break
            best = max(votes, key=votes.__getitem__)
            survival *= votes[best] / total
            if survival < self.options.least_survival:
                break
            draft.append(best)
            candidates = [c for token, c in zip(said, candidates, strict=True) if token == best]
        return draft

    def _candidates(self) -> tuple[list[_Candidate], int]:
        """Earlier ends, the longest agreement first, and that agreement in tokens."""
        text = self.tokens
        found: list[tuple[int, _Candidate]] = []
        for chains in (self._own, *self._memory.of(self._namespace)):
            for end in chains.ends(text, MOST_CANDIDATES - len(found)):
                agreement = _agreement(chains, end, text)
                found.append((agreement, _Candidate(chains.tokens, end, 2.0**agreement, chains is self._own)))
        found.sort(key=_by_agreement)
        return [candidate for _, candidate in found], found[0][0] if found else 0


def _by_agreement(entry: tuple[int, _Candidate]) -> int:
    return -entry[0]


def _agreement(chains: RunChains, end: int, text: array[int]) -> int:
    """How many tokens before `end` are those that end the text; a run's are known to be."""
    most = min(LONGEST_AGREEMENT, end, len(text))
    tokens, count = chains.tokens, chains.run
    while count < most and tokens[end - 1 - count] == text[-1 - count]:
        count += 1
    return count
