"""What a draft service tells in numbers: counted by the loop, read from other threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from specdecode.telemetry.metrics import Family, Histogram, Sample, counter, gauge, histogram
from specdecode.types import Draft, DrafterKind


class DraftCounts:
    """Sums over drafts, by drafter."""

    def __init__(self, offered: Iterable[DrafterKind]) -> None:
        kinds = tuple(offered)
        self._drafts = Counter(dict.fromkeys(kinds, 0))
        self._tokens = Counter(dict.fromkeys(kinds, 0))
        self._empty = Counter(dict.fromkeys(kinds, 0))
        self._failed = Counter(dict.fromkeys(kinds, 0))
        self._seconds = {kind: Histogram() for kind in kinds}

    def count(self, kind: DrafterKind, draft: Draft) -> None:
        """Counts an answer."""
        if draft.error is not None:
            self._failed[kind] += 1
            return
        self._drafts[kind] += 1
        self._tokens[kind] += len(draft.token_ids)
        self._empty[kind] += not draft.token_ids
        self._seconds[kind].observe(draft.seconds)

    def families(self, num_sequences: int) -> list[Family]:
        """What was counted, and how many sequences are open."""
        open_now = Sample(num_sequences)
        return [
            _counter("drafts", "Drafts made, empty ones included", self._drafts),
            _counter("tokens", "Tokens drafted", self._tokens),
            _counter("empty", "Drafts without a token", self._empty),
            _counter("failed", "Drafts that failed", self._failed),
            gauge("specdecode_drafter_sequences", "Sequences open", open_now),
            histogram(
                "specdecode_drafter_seconds",
                "From a draft being asked for to its last token",
                *(seconds.sample(drafter=kind.value) for kind, seconds in self._seconds.items()),
            ),
        ]


def _counter(name: str, what: str, counts: Counter[DrafterKind]) -> Family:
    samples = (Sample(count, {"drafter": kind.value}) for kind, count in counts.items())
    return counter(f"specdecode_drafter_{name}", what, *samples)
