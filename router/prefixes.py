"""What a replica's prefix cache holds, as far as this router sent it there: digests of whole blocks.

Nothing is asked of the replica. What it has evicted meanwhile, or what others had it compute, is not known: a
wrong guess costs time, never text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specdecode.lm.pool import Digest, block_digest, salt_digest


def prefix_digests(token_ids: Sequence[int], block_size: int, salt: bytes) -> list[Digest]:
    """Digests of a text's full blocks as a replica's own pool makes them; the newest token has no KV."""
    parent = salt_digest(salt)
    digests = []
    for start in range(0, len(token_ids) - block_size, block_size):
        parent = block_digest(parent, token_ids[start : start + block_size])
        digests.append(parent)
    return digests


class PrefixIndex:
    """Blocks that one replica should have, those used longest ago forgotten first.

    Attributes:
        capacity: blocks of the replica's pool.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self._known: OrderedDict[Digest, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def num_known(self, digests: Sequence[Digest]) -> int:
        """Blocks of the longest known prefix."""
        for count, digest in enumerate(digests):
            if digest not in self._known:
                return count
        return len(digests)

    def add(self, digests: Sequence[Digest]) -> None:
        """These blocks are computed there; tails first, so that a prefix outlives its continuations."""
        for digest in reversed(digests):
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > self.capacity:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """The replica has forgotten everything."""
        self._known.clear()
