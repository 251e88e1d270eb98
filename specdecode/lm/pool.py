"""The pool of KV blocks: who owns which block, and which blocks hold a known prefix.

A block holds the keys and values of `block_size` consecutive tokens in every layer. Blocks are shared by
reference count; a full block whose tokens are all committed may be published under the chained digest of its
tokens, and is then found again by `match` until its storage is needed for something else.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

Digest = bytes


class OutOfBlocksError(Exception):
    """The pool has fewer free blocks than asked for; nothing was taken."""


class IntegrityError(AssertionError):
    """An invariant of the pool does not hold."""


def block_digest(parent: Digest, token_ids: Sequence[int]) -> Digest:
    """Digest of a full block: its tokens chained to all before it (`parent` is the salt for the first)."""
    tokens = np.asarray(token_ids, dtype="<i4").tobytes()
    return hashlib.blake2b(tokens, key=parent[:64], digest_size=16).digest()


def salt_digest(salt: bytes) -> Digest:
    """Root of the digests of one salt."""
    return hashlib.blake2b(salt, person=b"specdecode-salt", digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks with a prefix cache in those that are free.

    Args:
        num_blocks: blocks in all.
        block_size: tokens a block holds.
        prefix_cache: whether published blocks are found again.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._digest_of: list[Digest | None] = [None] * num_blocks
        self._block_of: dict[Digest, int] = {}
        # Taken from the front: blocks without a digest first, then the least recently released.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody references, cached ones included."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks; what they cached is forgotten.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(self._free)} free")
        return [self._take() for _ in range(count)]

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each; tails first, so that a cached prefix outlives its continuations."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._digest_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def match(self, digests: Iterable[Digest]) -> list[int]:
        """Takes a reference to each cached block of the longest known prefix of `digests`."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def knows(self, digest: Digest) -> bool:
        """Whether `match` would find this digest."""
        return digest in self._block_of

    def publish(self, block: int, digest: Digest) -> None:
        """Makes a full, committed block findable; the first block published under a digest stays."""
        if self.prefix_cache and digest not in self._block_of and self._digest_of[block] is None:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def forget(self, blocks: Iterable[int]) -> None:
        """Takes blocks out of the prefix cache: what they hold is not to be trusted."""
        for block in blocks:
            digest = self._digest_of[block]
            if digest is not None:
                del self._block_of[digest]
                self._digest_of[block] = None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Proves the invariants against the block tables of everyone who holds blocks.

        Raises:
            IntegrityError: a block is lost, owned by more than its references say, or cached under a stale
                digest.
        """
        held = Counter[int]()
        for table in tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a table names a block twice: {list(table)}")
            held.update(table)
        for block, references in enumerate(self._references):
            if held[block] != references:
                raise IntegrityError(f"block {block}: {held[block]} owners, {references} references")
            if (references == 0) != (block in self._free):
                raise IntegrityError(f"block {block}: {references} references, free={block in self._free}")
        for digest, block in self._block_of.items():
            if self._digest_of[block] != digest:
                raise IntegrityError(f"block {block} is cached under a digest that is not its own")
        if len(self._block_of) != sum(digest is not None for digest in self._digest_of):
            raise IntegrityError("a block has a digest that does not lead to it")

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self.forget([block])
        self._references[block] = 1
        return block
