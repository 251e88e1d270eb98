"""Blocks and sequences: nobody's block is lost, shared or written by mistake."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specdecode.lm.pool import BlockPool, IntegrityError, OutOfBlocksError, block_digest, salt_digest
from specdecode.lm.sequence import KVSequence

SIZE = 4


def publish(pool: BlockPool, prompt: list[int], salt: bytes = b"") -> list[int]:
    """Caches the full blocks of `prompt` and returns them, released."""
    sequence = KVSequence(pool, prompt, salt)
    sequence.reserve(len(prompt))
    sequence.kv_len = len(prompt)
    sequence.publish()
    blocks = list(sequence.block_table[: len(prompt) // pool.block_size])
    sequence.release()
    return blocks


def cached(pool: BlockPool, prompt: list[int], salt: bytes = b"") -> list[int]:
    """The blocks that a new sequence with this prompt (and one more token) finds."""
    sequence = KVSequence(pool, [*prompt, 0], salt)
    sequence.adopt_prefix()
    found = list(sequence.block_table)
    sequence.release()
    return found


def test_digests_chain_over_everything_before_a_block() -> None:
    root = salt_digest(b"")
    first, other = block_digest(root, [1, 2, 3, 4]), block_digest(root, [1, 2, 3, 5])
    assert len({first, other, block_digest(first, [9] * 4), block_digest(other, [9] * 4)}) == 4
    assert block_digest(first, [9] * 4) == block_digest(block_digest(root, [1, 2, 3, 4]), [9] * 4)


def test_a_prompt_whose_first_block_differs_shares_nothing() -> None:
    pool = BlockPool(8, SIZE)
    publish(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert len(cached(pool, [1, 2, 3, 4, 5, 6, 7, 8])) == 2
    assert len(cached(pool, [1, 2, 3, 4, 5, 6, 7, 9])) == 1
    assert cached(pool, [0, 2, 3, 4, 5, 6, 7, 8]) == []


def test_salts_isolate() -> None:
    pool = BlockPool(8, SIZE)
    mine = publish(pool, list(range(8)), salt=b"a")
    assert cached(pool, list(range(8)), salt=b"a") == mine
    assert cached(pool, list(range(8)), salt=b"b") == []
    assert cached(pool, list(range(8))) == []


@pytest.mark.parametrize("token", [1 + (1 << 8), 1 + (1 << 16), 1 + (1 << 30)])
def test_a_digest_is_of_every_bit_of_its_ids(token: int) -> None:
    root = salt_digest(b"")
    assert block_digest(root, [0, 1, 2, 3]) != block_digest(root, [0, token, 2, 3])


def test_a_salt_counts_to_its_last_byte() -> None:
    beginning = b"one tenant's salt may begin like another's, for more bytes than any hash's own salt has: "
    assert salt_digest(beginning + b"a") != salt_digest(beginning + b"b")


def test_the_newest_token_is_never_taken_from_the_cache() -> None:
    pool = BlockPool(8, SIZE)
    publish(pool, list(range(8)))
    sequence = KVSequence(pool, list(range(8)))
    assert sequence.adopt_prefix() == 4
    assert sequence.missing == [4, 5, 6, 7]


def test_without_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(8, SIZE, prefix_cache=False)
    publish(pool, list(range(8)))
    assert cached(pool, list(range(8))) == []


def test_cached_blocks_are_evicted_last_and_tails_before_heads() -> None:
    pool = BlockPool(6, SIZE)
    older = publish(pool, [1] * 8)
    newer = publish(pool, [2] * 8)
    pool.release(pool.allocate(2))
    order = pool.allocate(6)
    assert set(order[:2]).isdisjoint([*older, *newer])
    assert order[2:] == [older[1], older[0], newer[1], newer[0]]
    pool.check_integrity([order])
    assert cached(pool, [2] * 8) == []


def test_use_keeps_a_prefix_in_the_cache() -> None:
    pool = BlockPool(4, SIZE)
    used = publish(pool, [1] * 8)
    unused = publish(pool, [2] * 8)
    assert cached(pool, [1] * 8) == used
    assert pool.allocate(2) == unused[::-1]
    assert cached(pool, [1] * 8) == used


def test_allocating_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(3, SIZE)
    held = pool.allocate(1)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity([held])


def test_truncating_into_a_published_block_leaves_it_unwritten() -> None:
    pool = BlockPool(8, SIZE)
    sequence = KVSequence(pool, list(range(10)))
    sequence.reserve(9)
    sequence.kv_len = 9
    sequence.publish()
    published = sequence.block_table[:2]
    sequence.truncate(7)
    assert sequence.kv_len == 4
    sequence.commit([70, 71])
    sequence.reserve(4)
    assert sequence.block_table[0] == published[0]
    assert sequence.block_table[1] not in published
    assert cached(pool, list(range(8))) == published


def test_truncated_tokens_are_published_under_what_replaced_them() -> None:
    pool = BlockPool(8, SIZE)
    sequence = KVSequence(pool, list(range(10)))
    sequence.reserve(9)
    sequence.kv_len = 9
    sequence.publish()
    sequence.truncate(6)
    sequence.commit([60, 61, 62])
    sequence.reserve(4)
    sequence.kv_len = 8
    sequence.publish()
    assert cached(pool, [0, 1, 2, 3, 4, 5, 60, 61]) == sequence.block_table
    assert len(cached(pool, list(range(8)))) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, table: table.pop(),
        lambda pool, table: table.append(table[0]),
        lambda pool, table: pool.release([table[0]]),
        lambda pool, table: pool.match([salt_digest(b"x")]),
    ],
    ids=["lost", "named twice", "released while held", "cached under a stale digest"],
)
def test_check_integrity_notices(damage: object) -> None:
    pool = BlockPool(4, SIZE)
    table = pool.allocate(2)
    pool.check_integrity([table])
    pool.publish(table[1], salt_digest(b"x"))
    damage(pool, table)  # type: ignore[operator]
    with pytest.raises(IntegrityError):
        pool.check_integrity([table])


@dataclass(eq=False)
class Modelled:
    """A sequence and what it was opened with."""

    kv: KVSequence
    salt: bytes


class PoolMachine(RuleBasedStateMachine):
    """Sequences that are fed, rolled back, truncated, published and shared, against blocks of plain tuples.

    `content[block][offset]` is the history (salt and all tokens up to the position) last written there.
    """

    NUM_BLOCKS = 9
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, SIZE)
        self.content: list[list[tuple[bytes, tuple[int, ...]] | None]] = [
            [None] * SIZE for _ in range(self.NUM_BLOCKS)
        ]
        self.open: list[Modelled] = []

    @rule(
        target=sequences,
        shared=st.integers(0, 12),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        salt=st.sampled_from([b"", b"", b"s"]),
        chunk=st.integers(0, 18),
    )
    def open_sequence(self, shared: int, tokens: list[int], salt: bytes, chunk: int) -> Modelled:
        modelled = Modelled(KVSequence(self.pool, [*range(shared), *tokens], salt), salt)
        modelled.kv.adopt_prefix()
        self.open.append(modelled)
        self.prefill(modelled, chunk)
        return modelled

    @rule(modelled=sequences, chunk=st.integers(1, 18))
    def prefill(self, modelled: Modelled, chunk: int) -> None:
        """Some of the missing tokens but the newest, published when full."""
        self._write(modelled, modelled.kv.missing[:-1][:chunk])
        modelled.kv.publish()

    @rule(
        modelled=sequences,
        drafts=st.lists(st.integers(0, 1), max_size=6),
        accepted=st.integers(0, 6),
        token=st.integers(0, 1),
    )
    def verify(self, modelled: Modelled, drafts: list[int], accepted: int, token: int) -> None:
        """A round: the last token and drafts run, some are accepted, one more token comes, the rest goes."""
        kv = modelled.kv
        if len(kv.missing) != 1 or not self._write(modelled, [*kv.missing, *drafts]):
            return
        kv.commit([*drafts[:accepted], token])
        kv.rollback(kv.committed_length - 1)
        kv.publish()

    @rule(modelled=sequences, fewer=st.integers(0, 9))
    def truncate(self, modelled: Modelled, fewer: int) -> None:
        modelled.kv.truncate(max(modelled.kv.committed_length - fewer, 1))

    @rule(modelled=sequences, fewer=st.integers(0, 9))
    def rollback(self, modelled: Modelled, fewer: int) -> None:
        modelled.kv.rollback(max(modelled.kv.kv_len - fewer, 0))

    @rule(modelled=sequences)
    def preempt_and_resume(self, modelled: Modelled) -> None:
        modelled.kv.release()
        modelled.kv.adopt_prefix()

    @rule(modelled=consumes(sequences))
    def close(self, modelled: Modelled) -> None:
        modelled.kv.release()
        self.open.remove(modelled)

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        self.pool.check_integrity([modelled.kv.block_table for modelled in self.open])
        for modelled in self.open:
            modelled.kv.check_integrity()
        held = {block for modelled in self.open for block in modelled.kv.block_table}
        assert self.pool.num_free == self.NUM_BLOCKS - len(held)

    @invariant()
    def every_position_with_kv_holds_its_own_history(self) -> None:
        for modelled in self.open:
            for position in range(modelled.kv.kv_len):
                block = modelled.kv.block_table[position // SIZE]
                expected = (modelled.salt, tuple(modelled.kv.token_ids[: position + 1]))
                assert self.content[block][position % SIZE] == expected

    def _write(self, modelled: Modelled, token_ids: list[int]) -> bool:
        kv = modelled.kv
        before = list(kv.block_table)
        try:
            kv.reserve(len(token_ids))
        except OutOfBlocksError:
            assert kv.block_table == before
            return False
        history = kv.token_ids[: kv.kv_len]
        others = {b for other in self.open if other is not modelled for b in other.kv.block_table}
        for token in token_ids:
            position = len(history)
            history.append(token)
            block = kv.block_table[position // SIZE]
            assert block not in others, "a block that another sequence holds is written"
            assert not self._findable(block), "a block that the prefix cache may hand out is written"
            self.content[block][position % SIZE] = (modelled.salt, tuple(history))
        kv.kv_len += len(token_ids)
        return True

    def _findable(self, block: int) -> bool:
        return block in self.pool._block_of.values()


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestPool = PoolMachine.TestCase
