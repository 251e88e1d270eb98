"""Which ids a draft with a reduced vocabulary may propose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specdecode.distill.corpus import Text
from specdecode.errors import InvalidArgumentError

_NUM_EXPECTED = 24_000
"""Positions whose whole distribution is looked at."""
_ROWS_AT_ONCE = 256


def frequent_ids(
    texts: Sequence[Text],
    size: int,
    always: Iterable[int],
    head: Tensor,  # [V, d], the target's
) -> Tensor:
    """The `size` most frequent ids of the texts' answers, and `always` among them: ascending, int64.

    An id counts as often as it was written, and once more as often as the target expected to write it: a few
    hundred thousand tokens hold most rare ids by chance, and a whole distribution knows of all of them.

    Raises:
        InvalidArgumentError: `size` is beyond the vocabulary.
    """
    vocab_size = len(head)
    if not 1 <= size <= vocab_size:
        raise InvalidArgumentError.of(
            "--vocabulary", f"{size} must be from 1 to the {vocab_size} ids of the target's vocabulary"
        )
    written = torch.tensor([token for text in texts for token in text.answer])
    counts = torch.bincount(written, minlength=vocab_size) + expected_counts(texts, head)
    counts[[token for token in always if token < vocab_size]] = torch.inf
    # Of equals the lowest comes first.
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def expected_counts(
    texts: Sequence[Text],
    head: Tensor,  # [V, d]
) -> Tensor:
    """How often the target expected to write each id in all the answers, from every n-th position: [V]
    float32.
    """
    hidden = torch.cat([text.hidden for text in texts])
    step = -(-len(hidden) // _NUM_EXPECTED)
    counts = torch.zeros(len(head))
    for rows in hidden[::step].split(_ROWS_AT_ONCE):  # type: ignore[no-untyped-call]
        counts += torch.softmax((rows @ head.T).float(), dim=1).sum(dim=0)
    return counts * step
