"""Mistakes with KV: rollback, positions, blocks and the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

from tests.mutations.mutation import DRAFT_MODEL, ORACLES, PAGED, POOL, Edit, Mutation, one


def rollback() -> Iterator[Mutation]:
    engine, sequence = "target_service/engine.py", "specdecode/lm/sequence.py"
    text = f"{ORACLES}test_text_does_not_depend_on_drafts[greedy-half right-3]"
    yield one(
        "rollback keeps one token too many",
        engine,
        "sequence.kv.rollback(sequence.committed_length - 1)",
        "sequence.kv.rollback(sequence.committed_length)",
        text,
    )
    yield one(
        "rollback keeps one token too few",
        engine,
        "sequence.kv.rollback(sequence.committed_length - 1)",
        "sequence.kv.rollback(sequence.committed_length - 2)",
        text,
    )
    yield one(
        "rollback forgets the positions and keeps their blocks",
        sequence,
        "        keep = self.pool.blocks_for(self.kv_len)\n",
        "        keep = len(self.block_table)\n",
        text,
        f"{POOL}TestPool",
    )
    yield Mutation(
        "positions are one off after a rejection",
        (
            Edit(
                sequence,
                "        self.kv_len = min(self.kv_len, kv_len)\n",
                "        self.shift = int(kv_len < self.kv_len)\n"
                "        self.kv_len = min(self.kv_len, kv_len)\n",
            ),
            Edit(
                "specdecode/lm/runner.py",
                "position_ids=plan.positions[None],",
                "position_ids=plan.positions[None] + torch.tensor(\n"
                "    [getattr(c.sequence, 'shift', 0) for c in chunks for _ in c.token_ids]\n"
                "),",
            ),
        ),
        (f"{DRAFT_MODEL}test_drafts_and_kv_are_those_of_a_fresh_start_after_any_history",),
    )
    yield one(
        "a rollback into a shared block writes on in it",
        sequence,
        "            kv_len -= kv_len % size\n",
        "            kv_len -= 0\n",
        f"{POOL}test_truncating_into_a_published_block_leaves_it_unwritten",
    )
    yield one(
        "the drafter keeps KV of the first token that was not accepted",
        "draft_service/ngram.py",
        "            return index\n",
        "            return index + 1\n",
        f"{DRAFT_MODEL}test_drafts_and_kv_are_those_of_a_fresh_start_after_any_history",
    )
    yield one(
        "the drafter takes its whole draft for accepted",
        "draft_service/model.py",
        "            accepted = common_prefix(self.drafted, new)\n",
        "            accepted = min(len(self.drafted), len(new))\n",
        f"{ORACLES}test_a_drafter_that_has_the_targets_model_is_never_wrong",
        f"{DRAFT_MODEL}test_drafts_and_kv_are_those_of_a_fresh_start_after_any_history",
    )


def prefix_cache() -> Iterator[Mutation]:
    engine, sequence = "target_service/engine.py", "specdecode/lm/sequence.py"
    later = f"{ORACLES}test_later_requests_with_the_same_beginnings_get_the_same_text[greedy]"
    commit = "        sequence.kv.commit(token_ids)\n"
    yield one(
        "the prefix cache is fed before rejected drafts are rolled back",
        engine,
        commit,
        f"{commit}        sequence.kv.publish()\n",
        later,
    )
    yield one(
        "the prefix cache is fed with drafted tokens",
        engine,
        commit,
        "        length = sequence.committed_length\n"
        "        sequence.kv.commit(work.drafted)\n"
        "        sequence.kv.publish()\n"
        "        del sequence.kv.token_ids[length:]\n" + commit,
        later,
    )
    yield one(
        "a block counts as full one token early",
        sequence,
        "        final = min(self.kv_len, len(self.token_ids)) // self.pool.block_size\n",
        "        final = min(self.kv_len + 1, len(self.token_ids)) // self.pool.block_size\n",
        f"{POOL}TestPool",
        later,
    )
    yield one(
        "a block is found by its own tokens, whatever came before it",
        sequence,
        "            parent = self._digests[-1] if self._digests else self._root\n",
        "            parent = self._root\n",
        f"{POOL}TestPool",
        f"{ORACLES}test_later_requests_with_the_same_beginnings_get_the_same_text[greedy]",
    )
    yield one(
        "the newest token is taken from the prefix cache",
        sequence,
        "        return self.digests((len(self.token_ids) - 1) // self.pool.block_size)\n",
        "        return self.digests(len(self.token_ids) // self.pool.block_size)\n",
        f"{POOL}test_the_newest_token_is_never_taken_from_the_cache",
    )
    yield one(
        "a block is handed out again and stays in the prefix cache",
        "specdecode/lm/pool.py",
        "            del self._block_of[digest]\n",
        "            self._block_of.get(digest)\n",
        f"{POOL}TestPool",
    )
    yield one(
        "who takes a block from the prefix cache does not own it",
        "specdecode/lm/pool.py",
        "            self._references[block] += 1\n",
        "            self._references[block] = max(self._references[block], 1)\n",
        f"{POOL}TestPool",
    )
    yield one(
        "tenants share the prefix cache",
        sequence,
        "        self._root = salt_digest(salt)\n",
        '        self._root = salt_digest(b"")\n',
        f"{POOL}test_salts_isolate",
    )
    yield one(
        "a digest outlives the tokens it was made of",
        sequence,
        "        del self._digests[num_tokens // self.pool.block_size :]\n",
        "        del self._digests[-(-num_tokens // self.pool.block_size) :]\n",
        f"{POOL}test_truncated_tokens_are_published_under_what_replaced_them",
    )


def attention() -> Iterator[Mutation]:
    path = "specdecode/lm/attention.py"
    yield one(
        "a sliding window is one token too long",
        path,
        "                mask &= distance < window\n",
        "                mask &= distance <= window\n",
        f"{PAGED}test_logits_of_mixed_ragged_batches_equal_the_plain_models",
    )
    yield one(
        "a later chunk takes its positions from its own start",
        path,
        "            positions += range(span.start, end)\n",
        "            positions += range(span.num_tokens)\n",
        f"{PAGED}test_logits_of_mixed_ragged_batches_equal_the_plain_models",
    )
