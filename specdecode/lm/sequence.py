"""One sequence's tokens and the blocks that hold their KV."""

from __future__ import annotations

from collections.abc import Sequence

from specdecode.lm.pool import BlockPool, Digest, IntegrityError, block_digest, salt_digest


class KVSequence:
    """Committed tokens, and KV for the first `kv_len` positions.

    Between steps kv_len ≤ committed − 1: the newest token has no KV yet. During a step positions beyond the
    committed tokens may hold KV of drafts, until `rollback`.

    Attributes:
        token_ids: committed tokens.
        kv_len: positions whose KV is valid.
        block_table: blocks of positions 0 … in order; the last may be partly used.
    """

    def __init__(self, pool: BlockPool, token_ids: Sequence[int], salt: bytes = b"") -> None:
        self.pool = pool
        self.token_ids = list(token_ids)
        self.kv_len = 0
        self.block_table: list[int] = []
        self._root = salt_digest(salt)
        self._digests: list[Digest] = []
        self._num_published = 0

    @property
    def committed_length(self) -> int:
        """Tokens that are final."""
        return len(self.token_ids)

    @property
    def missing(self) -> list[int]:
        """Committed tokens that have no KV yet, the newest included."""
        return self.token_ids[self.kv_len :]

    def blocks_missing(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` more positions need beyond those held."""
        return max(self.pool.blocks_for(self.kv_len + num_tokens) - len(self.block_table), 0)

    def digests(self, num_blocks: int) -> list[Digest]:
        """Digests of the first `num_blocks` blocks, all of whose tokens must be committed."""
        size = self.pool.block_size
        while len(self._digests) < num_blocks:
            start = len(self._digests) * size
            parent = self._digests[-1] if self._digests else self._root
            self._digests.append(block_digest(parent, self.token_ids[start : start + size]))
        return self._digests[:num_blocks]

    def shareable_digests(self) -> list[Digest]:
        """Digests of the blocks that may come from the prefix cache: all full ones before the newest
        token.
        """
        return self.digests((len(self.token_ids) - 1) // self.pool.block_size)

    def adopt_prefix(self) -> int:
        """Takes what the prefix cache knows of this sequence, if it holds nothing yet. Returns tokens
        found.
        """
        if self.block_table or not self.pool.prefix_cache:
            return 0
        self.block_table = self.pool.match(self.shareable_digests())
        self.kv_len = len(self.block_table) * self.pool.block_size
        self._num_published = len(self.block_table)
        return self.kv_len

    def reserve(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` more positions.

        Raises:
            OutOfBlocksError: the pool can't; nothing changed.
        """
        self.block_table += self.pool.allocate(self.blocks_missing(num_tokens))

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends final tokens."""
        self.token_ids += token_ids

    def rollback(self, kv_len: int) -> None:
        """Forgets KV from position `kv_len` on and gives back the blocks of the tail.

        Published blocks may be shared and are never written again: a length inside one falls to its start.
        """
        size = self.pool.block_size
        if kv_len < self._num_published * size:
            kv_len -= kv_len % size
            self._num_published = kv_len // size
        self.kv_len = min(self.kv_len, kv_len)
        keep = self.pool.blocks_for(self.kv_len)
        self.pool.release(self.block_table[keep:])
        del self.block_table[keep:]

    def publish(self) -> None:
        """Lets the prefix cache know full blocks, all of whose tokens are committed and computed."""
        final = min(self.kv_len, len(self.token_ids)) // self.pool.block_size
        for index in range(self._num_published, final):
            self.pool.publish(self.block_table[index], self.digests(index + 1)[index])
        self._num_published = max(self._num_published, final)

    def truncate(self, num_tokens: int) -> None:
        """Takes back committed tokens from `num_tokens` on, with their KV and that of the newest kept one.

        For drafters, whose committed tokens are what the target last said.
        """
        del self.token_ids[num_tokens:]
        del self._digests[num_tokens // self.pool.block_size :]
        self.rollback(max(num_tokens - 1, 0))

    def release(self) -> None:
        """Gives back every block; the tokens stay, so that the sequence can be computed again."""
        self.pool.release(self.block_table)
        self.block_table = []
        self.kv_len = 0
        self._num_published = 0

    def check_integrity(self) -> None:
        """Proves that the table matches the lengths.

        Raises:
            IntegrityError: it does not.
        """
        if self.kv_len > max(len(self.token_ids) - 1, 0):
            raise IntegrityError(f"kv_len {self.kv_len} with {len(self.token_ids)} committed tokens")
        if len(self.block_table) != self.pool.blocks_for(self.kv_len):
            raise IntegrityError(f"{len(self.block_table)} blocks hold {self.kv_len} tokens")
