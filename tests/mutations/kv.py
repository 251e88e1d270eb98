"""Mistakes with KV: rollback, positions, blocks and the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

from tests.mutations.mutation import DRAFT_MODEL, KERNELS, ORACLES, PAGED, POOL, Edit, Mutation, one


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
        "draft_service/lookup.py",
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
        "tenants whose salts begin alike share the prefix cache",
        "specdecode/lm/pool.py",
        "hashlib.blake2b(salt, person=",
        "hashlib.blake2b(salt[:16], person=",
        f"{POOL}test_a_salt_counts_to_its_last_byte",
    )
    yield one(
        "a block is found by the low bits of its tokens",
        "specdecode/lm/pool.py",
        'np.asarray(token_ids, dtype="<i4").tobytes()',
        'np.asarray(token_ids).astype("<u2").tobytes()',
        f"{POOL}test_a_digest_is_of_every_bit_of_its_ids",
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
    yield one(
        "what an earlier owner left behind a sequence's last token takes part in a dense batch",
        path,
        "torch.arange(num_keys, device=device) >= torch.tensor(ends",
        "torch.arange(num_keys, device=device) > torch.tensor(ends",
        f"{KERNELS}test_attention_reads_what_each_token_may_see_and_nothing_else",
    )


def kernels() -> Iterator[Mutation]:
    path = "specdecode/lm/cpu/kernels.cpp"
    reads = f"{KERNELS}test_attention_reads_what_each_token_may_see_and_nothing_else"
    yield one(
        "on the kernel a token sees the draft after it",
        path,
        "const int high = position + 1 - base < count ? position + 1 - base : count;",
        "const int high = position + 2 - base < count ? position + 2 - base : count;",
        f"{KERNELS}test_a_later_draft_is_nothing_to_the_tokens_before_it",
    )
    yield one(
        "on the kernel a sliding window is one token too long",
        path,
        "position - shape.window + 1 - base : 0",
        "position - shape.window - base : 0",
        reads,
    )
    yield one(
        "on the kernel the first block of a window is left out where the window begins at its end",
        path,
        "? oldest - shape.window + 1 : 0",
        "? oldest - shape.window + 2 : 0",
        reads,
    )
    yield one(
        "on the kernel a window's last token does not see itself where no heads share keys",
        path,
        "newest = span.start + (end - 1) / repeat;",
        "newest = span.start + (end - 2) / repeat;",
        reads,
    )
    yield one(
        "on the kernel greedy ties go to the highest id",
        path,
        "    int64_t index = 0;\n    while (index + 1 < size && get(in + index) != highest) ++index;\n",
        "    int64_t index = size - 1;\n    while (index > 0 && get(in + index) != highest) --index;\n",
        f"{KERNELS}test_best_tokens_takes_the_lowest_of_equals_and_names_rows_that_are_not_finite",
    )
    yield one(
        "the kernel's norm forgets ε",
        path,
        "1.0f / std::sqrt(sum / size + epsilon)",
        "1.0f / std::sqrt(sum / size)",
        f"{KERNELS}test_rms_norm_of_next_to_nothing",
    )
    yield one(
        "the kernels cut bfloat16 off instead of rounding it",
        "specdecode/lm/cpu/numbers.h",
        "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "bits >> 16",
        f"{KERNELS}test_numbers_are_rounded_as_torch_rounds_them",
    )
    yield one(
        "the kernel's norm is weighted before it is rounded",
        path,
        "rounded<T>(get(in + i) * scale)",
        "get(in + i) * scale",
        f"{KERNELS}test_a_norm_is_rounded_before_it_is_weighted_as_transformers_does",
    )
    yield one(
        "the kernel turns the second half of a head by the first half's angles",
        path,
        "second * get(cosine + half + i) + first * get(sine + half + i)",
        "second * get(cosine + half + i) + first * get(sine + i)",
        f"{KERNELS}test_rotate_and_store",
    )
    yield one(
        "a fused layer forgets its sliding window",
        "specdecode/lm/cpu/fused.py",
        "self.call.scaling, self.call.window, None)",
        "self.call.scaling, None, None)",
        f"{KERNELS}test_layers_on_kernels_equal_the_plain_model_in_float32",
    )
