"""KV that is there without having been computed, for measurements: what it holds changes no step's time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from specdecode.lm.runner import PagedLM
from specdecode.lm.sequence import KVSequence


class PretendedKV:
    """Gives sequences KV of their committed tokens, and takes care that nobody ever finds it.

    Args:
        lm: whose pool it is; used by nobody else meanwhile.
    """

    def __init__(self, lm: PagedLM) -> None:
        self._lm = lm
        self._touched: set[int] = set()

    def fill(self, sequences: Iterable[KVSequence], length: int) -> None:
        """Lets each have `length` positions, their full blocks published as after a step.

        Raises:
            OutOfBlocksError: the pool can't hold them.
        """
        for sequence in sequences:
            sequence.reserve(length)
            sequence.kv_len = length
            sequence.publish()
            self._touch(sequence.block_table)

    def forget(self, sequences: Iterable[KVSequence]) -> None:
        """Takes their blocks out of the prefix cache; before they are released."""
        for sequence in sequences:
            self._lm.pool.forget(sequence.block_table)

    @torch.inference_mode()
    def _touch(self, blocks: Iterable[int]) -> None:
        """Writes to blocks that were not written to yet: to read memory that the system has not handed out
        costs nothing, and real KV is not of that kind.
        """
        new = sorted(set(blocks) - self._touched)
        self._touched.update(new)
        if new:
            for stored in (*self._lm.kv.keys, *self._lm.kv.values):
                stored.index_fill_(0, torch.tensor(new, device=stored.device), 0)
