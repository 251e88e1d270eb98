"""Mistakes in the target, the drafters and the router."""

from __future__ import annotations

from collections.abc import Iterator

from tests.mutations.mutation import (
    BAD_ORDERS,
    DRAFT_MODEL,
    DRAWING,
    ENGINE,
    FAILOVER,
    FRAMES,
    ORACLES,
    ORDERS,
    ROUNDS,
    ROUTER_GENERATE,
    ROUTER_REQUEST,
    ROUTER_TEXT,
    ROWS,
    STOPS,
    Edit,
    Mutation,
    one,
)


def target() -> Iterator[Mutation]:
    engine, verify = "target_service/engine.py", "target_service/verify.py"
    sequence = "target_service/sequence.py"
    yield one(
        "the bonus is dropped",
        verify,
        "        token_ids = [*work.drafted[:accepted], token]\n",
        "        token_ids = [*work.drafted[:accepted], token][: max(count, 1)]\n",
        f"{ENGINE}test_all_drafts_accepted_end_in_a_bonus_and_no_drafts_in_a_plain_token",
    )
    yield one(
        "the bonus is told as recovered",
        verify,
        "Origin.BONUS if self.num_accepted == num_drafted",
        "Origin.BONUS if self.num_accepted > num_drafted",
        f"{ENGINE}test_all_drafts_accepted_end_in_a_bonus_and_no_drafts_in_a_plain_token",
    )
    yield one(
        "the coin of the acceptance also picks the token",
        verify,
        "        return accept, torch.rand(shape[0], generator=self._generator, dtype=torch.float64)\n",
        "        more = torch.rand(shape[0], generator=self._generator, dtype=torch.float64)\n"
        "        return accept, accept[:, -1] if shape[1] else more\n",
        f"{ORACLES}test_sampled_texts_have_the_targets_distribution[rejection-model-plain-1]",
    )
    yield one(
        "the same coins are thrown in every step",
        verify,
        "        accept = torch.rand(shape, generator=self._generator, dtype=torch.float64)\n",
        "        accept = torch.rand(shape, generator=self._generator.manual_seed(0), dtype=torch.float64)\n",
        f"{ORACLES}test_sampled_texts_have_the_targets_distribution[rejection-model-plain-1]",
        f"{ORACLES}test_sampled_texts_have_the_targets_distribution[rejection-one-hot-plain-2]",
    )
    yield one(
        "penalties of the target's rows do not see the drafts",
        verify,
        "sequence.opened.num_prompt_tokens, work.drafted)",
        "sequence.opened.num_prompt_tokens, sequence.kv.token_ids[:1] * len(work.drafted))",
        f"{ORACLES}test_text_does_not_depend_on_drafts[greedy-right-8]",
    )
    yield one(
        "penalties of the target's rows see the drafts as committed as well",
        verify,
        "    return Window(sequence.sampling, sequence.kv.token_ids, sequence",
        "    return Window(sequence.sampling, [*sequence.kv.token_ids, *work.drafted], sequence",
        f"{ORACLES}test_text_does_not_depend_on_drafts[greedy-right-8]",
    )
    yield one(
        "penalties see the text as it was when the sequence was opened",
        verify,
        "    return Window(sequence.sampling, sequence.kv.token_ids, sequence",
        "    return Window(sequence.sampling, sequence.opened.token_ids, sequence",
        f"{ORACLES}test_text_does_not_depend_on_drafts[greedy-right-3]",
    )
    yield one(
        "q of another position is believed where drafts were cut off",
        verify,
        "            q_token_ids[b, :count][inside] = work.q.token_ids[:total]\n"
        "            q_probs[b, :count][inside] = work.q.probs[:total]\n",
        "            q_token_ids[b, :count][inside] = work.q.token_ids[len(work.q.token_ids) - total :]\n"
        "            q_probs[b, :count][inside] = work.q.probs[len(work.q.probs) - total :]\n",
        f"{ORACLES}test_sampled_texts_have_the_targets_distribution[rejection-model-transformed-2]",
    )
    yield one(
        "q is believed although it is not trusted",
        sequence,
        "        return self.verify.q if self.verify and self.sequence.opened.trust_draft else None\n",
        "        return self.verify.q if self.verify else None\n",
        f"{ENGINE}test_q_counts_only_where_the_draft_is_trusted",
    )
    yield one(
        "logprobs are those of the last rows",
        verify,
        "    return tuple(token_logprobs(logits[: len(token_ids)], ids, num_top))\n",
        "    return tuple(token_logprobs(logits[-len(token_ids) :], ids, num_top))\n",
        f"{ROWS}test_logprobs_are_those_of_their_own_token_in_the_raw_logits",
    )
    yield one(
        "logprobs are shifted by one row",
        verify,
        "    return tuple(token_logprobs(logits[: len(token_ids)], ids, num_top))\n",
        "    return tuple(token_logprobs(logits.roll(-1, 0)[: len(token_ids)], ids, num_top))\n",
        f"{ROWS}test_logprobs_are_those_of_their_own_token_in_the_raw_logits",
    )
    yield one(
        "a window of another method takes the wrong rows",
        verify,
        "for r in range(start, start + w.chunk.num_logits)",
        "for r in range(start + 1, start + 1 + w.chunk.num_logits)",
        f"{ORACLES}test_methods_mix_in_one_step",
    )
    yield one(
        "a stop id inside an accepted run does not end the text",
        sequence,
        "            if token in stops:\n",
        "            if token in stops and count == len(token_ids):\n",
        f"{ENGINE}test_a_stop_id_inside_an_accepted_run_drops_what_was_accepted_after_it",
        f"{ENGINE}test_the_earliest_boundary_wins",
    )
    yield one(
        "the last stop id of a run ends the text, not the first",
        sequence,
        "        for count, token in enumerate(token_ids[: self.room], start=1):\n",
        "        for count, token in reversed([*enumerate(token_ids[: self.room], start=1)]):\n",
        f"{ENGINE}test_a_stop_id_inside_an_accepted_run_drops_what_was_accepted_after_it",
        f"{ENGINE}test_the_earliest_boundary_wins",
    )
    yield one(
        "drafts go up to max_tokens, so that the bonus would go past it",
        sequence,
        "        return self.verify.drafted[: self.room - 1] if self.verify else ()\n",
        "        return self.verify.drafted[: self.room] if self.verify else ()\n",
        f"{ENGINE}test_never_one_token_past_max_tokens",
    )
    yield Mutation(
        "tokens past max_tokens are emitted",
        (
            Edit(
                sequence,
                "        return self.verify.drafted[: self.room - 1] if self.verify else ()\n",
                "        return self.verify.drafted if self.verify else ()\n",
            ),
            Edit(
                sequence,
                "            return self.room, FinishReason.LENGTH\n",
                "            return len(token_ids), FinishReason.LENGTH\n",
            ),
        ),
        (f"{ENGINE}test_never_one_token_past_max_tokens",),
    )
    yield one(
        "output that Open brought along is not counted",
        sequence,
        "        return self.committed_length - self.opened.num_prompt_tokens\n",
        "        return self.committed_length - len(self.opened.token_ids)\n",
        f"{ROWS}test_a_resumed_sequence_goes_on_as_if_nothing_had_happened",
        f"{ENGINE}test_a_sequence_resumed_with_output_counts_it",
    )
    yield one(
        "output that Open brought along counts as prompt",
        verify,
        "sequence.kv.token_ids, sequence.opened.num_prompt_tokens,",
        "sequence.kv.token_ids, len(sequence.opened.token_ids),",
        f"{ROWS}test_a_resumed_sequence_goes_on_as_if_nothing_had_happened",
        f"{ENGINE}test_a_sequence_resumed_with_output_counts_it",
    )
    yield one(
        "a lease counts from when it arrives",
        engine,
        "        sequence.lease_end = lease.committed_length + lease.num_tokens\n",
        "        sequence.lease_end = sequence.committed_length + lease.num_tokens\n",
        f"{ENGINE}test_a_lease_replaces_the_limit_and_is_absolute",
    )
    yield one(
        "a lease adds to what is left",
        engine,
        "        sequence.lease_end = lease.committed_length + lease.num_tokens\n",
        "        sequence.lease_end = max(sequence.lease_end, lease.committed_length) + lease.num_tokens\n",
        f"{ENGINE}test_a_lease_replaces_the_limit_and_is_absolute",
    )
    yield one(
        "a stale Verify is run",
        engine,
        "        if verify.committed_length != sequence.committed_length:\n",
        "        if verify.committed_length > sequence.committed_length:\n",
        f"{ENGINE}test_a_verify_for_another_length_is_dropped",
    )
    yield one(
        "a Verify is run again and again",
        engine,
        "        sequence.verify = None\n",
        "        sequence.verify = sequence.verify\n",
        f"{ENGINE}test_a_verify_for_another_length_is_dropped",
    )
    yield one(
        "who is preempted keeps the KV it gave back",
        "target_service/scheduler.py",
        "        self._release(sequence)\n        sequence.num_preemptions += 1\n",
        "        length = sequence.kv.kv_len\n"
        "        self._release(sequence)\n"
        "        sequence.kv.kv_len = length\n"
        "        sequence.num_preemptions += 1\n",
        f"{ORACLES}test_text_does_not_depend_on_leases_preemption_or_chunks[greedy]",
    )
    yield one(
        "the prefill of a window also draws from its rows",
        "target_service/scheduler.py",
        "Chunk(sequence.kv, [*missing, *drafted], len(drafted) + 1)",
        "Chunk(sequence.kv, [*missing, *drafted], len(drafted) + len(missing))",
        f"{ORACLES}test_text_does_not_depend_on_leases_preemption_or_chunks[greedy]",
    )
    yield one(
        "a token is drawn after a row that is not finite",
        verify,
        "            if outcomes[i].num_accepted >= first:\n",
        "            if outcomes[i].num_accepted > first:\n",
        f"{BAD_ORDERS}test_nan_ends_its_own_sequence_only",
    )
    yield one(
        "a rejected draft that the model has no answer to ends the text",
        verify,
        "            if outcomes[i].num_accepted >= first:\n",
        "            if outcomes[i].num_accepted >= 0:\n",
        f"{BAD_ORDERS}test_a_rejected_draft_that_the_model_has_no_answer_to_changes_nothing",
        f"{BAD_ORDERS}test_what_comes_before_a_row_without_answer_has_the_targets_distribution",
    )


def frames() -> Iterator[Mutation]:
    path = "target_service/frames.py"
    merging = f"{FRAMES}test_steps_of_a_lease_become_one_result_in_order"
    yield one(
        "a merged frame tells the last step's tokens only",
        path,
        "token_ids=tuple(token for result in run for token in result.token_ids)",
        "token_ids=run[-1].token_ids",
        merging,
    )
    yield one(
        "a round with drafts is merged with a lease",
        path,
        "plain = not (before.num_drafted or result.num_drafted or before.ended",
        "plain = not (before.ended",
        f"{FRAMES}test_what_is_no_token_of_the_same_lease_stays_a_result_of_its_own",
    )
    yield one(
        "a lease that runs out is held back",
        path,
        "return not result.ended and result.lease_left >= MIN_LEASE_LEFT",
        "return not result.ended",
        f"{FRAMES}test_whoever_is_waited_for_takes_all_along",
    )
    yield one(
        "half of a frame that is too large is lost",
        "specdecode/wire/sizes.py",
        "return replace(frame, **first), replace(frame, **second)",
        "return (replace(frame, **first),)",
        "tests/router/test_message_limits.py::test_parts_hold_every_order_once_and_in_order",
    )


def drafter() -> Iterator[Mutation]:
    drawing, model = "draft_service/drawing.py", "draft_service/model.py"
    yield one(
        "drafts are sampled before top-p, q is sent after it",
        drawing,
        "    columns = sampling.inverse_cdf(probs, u.to(probs.device))  # [R]\n"
        "    picks = ids.gather(1, columns[:, None])[:, 0]\n",
        "    from dataclasses import replace\n"
        "    early = [replace(w, params=replace(w.params, top_p=1.0)) for w in windows]\n"
        "    early_ids, early_probs = _restricted(logits, early, top_k, token_ids)\n"
        "    picks = early_ids.gather(1, sampling.inverse_cdf(early_probs, u)[:, None])[:, 0]\n",
        f"{DRAWING}test_draws_follow_the_q_that_is_handed_on",
    )
    yield one(
        "drafts are sampled from the whole of q, its top-k is sent",
        drawing,
        "    columns = sampling.inverse_cdf(probs, u.to(probs.device))  # [R]\n"
        "    picks = ids.gather(1, columns[:, None])[:, 0]\n",
        "    picks = sampling.inverse_cdf(sampling.probabilities(logits, windows), u)\n",
        f"{DRAWING}test_draws_follow_the_q_that_is_handed_on",
    )
    yield one(
        "q is the draft's temperature-1 distribution",
        drawing,
        "    return _draws(picks, torch.isfinite(probs).all(dim=1), supports(ids, probs))\n",
        "    plain = logits.softmax(1).gather(1, ids)\n"
        "    return _draws(picks, torch.isfinite(probs).all(dim=1), supports(ids, plain))\n",
        f"{DRAWING}test_draws_follow_the_q_that_is_handed_on",
    )
    yield one(
        "the drafter's penalties do not see its own drafts",
        model,
        "self.kv.token_ids + self.drafted, self.order.num_prompt_tokens)",
        "self.kv.token_ids + self.kv.token_ids[:1] * len(self.drafted), self.order.num_prompt_tokens)",
        f"{DRAFT_MODEL}test_q_is_the_transformed_distribution_with_drafts_in_its_history",
    )
    yield one(
        "the drafter drafts past a stop id",
        model,
        "        return bool(self.drafted) and self.drafted[-1] in self._stop_ids\n",
        "        return False\n",
        f"{DRAFT_MODEL}test_nothing_is_drafted_after_a_stop_id",
    )
    yield one(
        "a sampled draft is there sooner when it ends at a stop id",
        model,
        "        self._stop_ids = frozenset(() if sampled else order.sampling.stop_token_ids)\n",
        "        self._stop_ids = frozenset(order.sampling.stop_token_ids)\n",
        "tests/draft/test_draft_length.py",
    )
    yield one(
        "a sampled draft is dropped for what comes after it",
        model,
        "error = None if sequence.drafted else NumericalError(_NO_DISTRIBUTION)",
        "error = NumericalError(_NO_DISTRIBUTION)",
        f"{DRAFT_MODEL}test_a_token_after_which_nothing_can_be_drawn_is_drafted_as_often_as_q_says",
    )
    yield one(
        "the drafter drafts one token past its context",
        model,
        "        room = drafter.lm.max_length - self.committed_length\n",
        "        room = drafter.lm.max_length - self.committed_length + 1\n",
        f"{DRAFT_MODEL}test_nothing_is_drafted_past_the_context_of_the_draft_model",
    )
    yield one(
        "the drafter publishes KV of its drafts",
        "specdecode/lm/sequence.py",
        "        final = min(self.kv_len, len(self.token_ids)) // self.pool.block_size\n",
        "        final = self.kv_len // self.pool.block_size\n",
        f"{DRAFT_MODEL}test_a_rejection_costs_no_turn_of_its_own",
    )


def foresight() -> Iterator[Mutation]:
    path = "router/seats.py"
    compared = "tests/router/test_seats.py::test_what_is_looked_up_is_compared_with_what_is_emitted"
    yield one(
        "what is looked up is compared one token off",
        path,
        "emitted = self.choice.tokens[found.committed_length :]",
        "emitted = self.choice.tokens[found.committed_length + 1 :]",
        compared,
    )
    yield one(
        "what is looked up counts before it is settled",
        path,
        "if is_settled:",
        "if emitted:",
        compared,
    )
    yield one(
        "what is looked up ends the lease",
        "router/policy.py",
        "return draft.length == 0 and costs is not None and costs.single_pass",
        "return False",
        f"{ROUNDS}test_what_is_looked_up_beside_leases_brings_drafting_back",
    )
    yield one(
        "a short match is followed for long",
        "draft_service/ngram_index.py",
        "num_tokens = min(num_tokens, max(int(agreeing * self.options.trust), 1))",
        "pass",
        "tests/draft/test_ngram.py::test_a_match_is_followed_as_far_as_what_precedes_it_agrees",
    )


def suffix() -> Iterator[Mutation]:
    index, drafter, tests = (
        "draft_service/suffix_index.py",
        "draft_service/suffix.py",
        "tests/draft/test_suffix.py::",
    )
    who = f"{tests}test_who_may_be_drafted_for_from_an_output"
    yield one(
        "tenants share what they put out",
        drafter,
        "(order.cache_salt, order.traffic_class)",
        '(b"", order.traffic_class)',
        who,
    )
    yield one(
        "what is to be forgotten is remembered",
        drafter,
        "drafter.memory if order.remembers_output else None",
        "drafter.memory",
        who,
    )
    yield one(
        "prompts are remembered",
        drafter,
        "self.index.tokens[self._num_prompt_tokens :]",
        "self.index.tokens",
        f"{tests}test_prompts_are_not_remembered",
    )
    yield one(
        "what ends a remembered output is proposed",
        index,
        "            votes.pop(_SEPARATOR, None)\n",
        "",
        f"{tests}test_separators_are_never_proposed",
    )
    yield one(
        "ends that are taken back are found",
        index,
        "                self._buckets[_hash(tokens, end, self.run) & self._mask] = before\n",
        "                pass\n",
        f"{tests}test_what_is_taken_back_leaves_no_trace",
    )
    yield one(
        "what agrees longer has one vote, too",
        index,
        "2.0**agreement",
        "1.0",
        f"{tests}TestPropose::test_a_longer_agreement_outweighs_frequent_short_ones",
    )
    yield one(
        "namespaces of next to nothing count as nothing",
        index,
        "return max(len(chains.tokens), _FIRST_BUCKETS)",
        "return len(chains.tokens)",
        f"{tests}TestMemory::test_many_namespaces_of_next_to_nothing_are_bounded_too",
    )
    yield one(
        "the memory grows",
        index,
        "while self._num_tokens > self.capacity:",
        "while False:",
        f"{tests}TestMemory::test_it_holds_its_capacity_and_forgets_the_oldest_first",
    )


def router() -> Iterator[Mutation]:
    text, request = "router/text.py", "router/request.py"
    by_definition = f"{ROUTER_TEXT}test_stop_strings_cut_by_definition_over_all_token_and_round_boundaries"
    cut = f"{ROUTER_REQUEST}test_a_stop_string_inside_an_accepted_run_cuts_text_ids_logprobs_rounds_and_usage"
    yield one(
        "the stop string that ends last wins",
        text,
        "        _, start, self.stop = min(found)\n",
        "        _, start, self.stop = max(found)\n",
        f"{STOPS}test_the_stop_string_that_ends_first_wins",
    )
    yield one(
        "the stop string that begins first wins",
        text,
        "            if start >= 0:\n                found.append((start + len(stop), start, stop))\n",
        "            if start >= 0:\n                found.append((start, start, stop))\n",
        f"{STOPS}test_the_stop_string_that_ends_first_wins",
    )
    yield one(
        "a stop string is not looked for across two tokens",
        text,
        "self._held.find(stop, max(0, old_length - len(stop) + 1))",
        "self._held.find(stop, old_length)",
        by_definition,
        f"{ROUTER_TEXT}test_a_stop_string_is_found_at_every_split_point",
    )
    yield one(
        "the beginning of a stop string is said",
        text,
        "        for length in range(min(self._longest_prefix, len(self._held)), 0, -1):\n",
        "        for length in range(min(self._longest_prefix, len(self._held)), 1, -1):\n",
        f"{ROUTER_TEXT}test_no_piece_holds_the_beginning_of_a_stop_string_that_later_completes",
        by_definition,
    )
    yield one(
        "half a character is said",
        text,
        "        return self._decoder.decode(self._token_bytes[token_id])\n",
        "        return self._token_bytes[token_id].decode(errors='replace')\n",
        f"{ROUTER_TEXT}test_a_character_split_over_rounds_is_never_shown_as_replacement",
    )
    yield one(
        "ids after a stop string are said and counted",
        request,
        "            if self._text.push(token.token_id):\n                break\n",
        "            if self._text.push(token.token_id):\n                continue\n",
        cut,
    )
    yield one(
        "tokens of another state of the text are taken",
        request,
        "        if result.committed_length != len(self.tokens) + len(result.token_ids):\n",
        "        if result.committed_length > len(self.tokens) + len(result.token_ids):\n",
        f"{ROUTER_REQUEST}test_tokens_that_do_not_follow_what_is_here_end_a_choice",
    )
    yield one(
        "a stop string ends a text one token before min_tokens",
        request,
        "        min_tokens = self.resolved.sampling.min_tokens\n",
        "        min_tokens = self.resolved.sampling.min_tokens - 1\n",
        f"{ROUTER_REQUEST}test_stop_strings_before_min_tokens_do_not_end_a_choice",
    )
    yield one(
        "the target is not told whose prefix cache to use",
        "router/rounds.py",
        "        cache_salt=resolved.cache_salt,\n",
        "",
        f"{ORDERS}test_a_target_is_told_all_of_a_choice_that_goes_on_there",
    )
    drafter_is_told = f"{ORDERS}test_a_drafter_is_told_what_the_target_is_told"
    drafts = "router/drafts.py"
    yield one(
        "the drafter is not told whose prefix cache to use",
        drafts,
        "        cache_salt=resolved.cache_salt,\n",
        "",
        drafter_is_told,
    )
    yield one(
        "the drafter draws every choice with the first one's noise",
        drafts,
        "        choice_index=choice.index,\n",
        "        choice_index=0,\n",
        drafter_is_told,
    )
    yield one(
        "the drafter takes what was emitted for prompt",
        drafts,
        "        num_prompt_tokens=len(resolved.prompt_token_ids),\n",
        "        num_prompt_tokens=len(choice.tokens),\n",
        drafter_is_told,
    )
    rounds = "router/rounds.py"
    yield one(
        "every choice is opened as the first one",
        rounds,
        "        choice_index=choice.index,\n",
        "        choice_index=0,\n",
        f"{ROUTER_GENERATE}test_choices_differ_share_the_prompt_and_do_not_depend_on_each_other",
    )
    yield one(
        "on another target the text goes on without what was emitted",
        rounds,
        "        token_ids=tuple(choice.tokens),\n",
        "        token_ids=resolved.prompt_token_ids,\n",
        f"{FAILOVER}[greedy-off]",
    )
    yield one(
        "on another target what was emitted is taken for prompt",
        rounds,
        "        num_prompt_tokens=len(resolved.prompt_token_ids),\n",
        "        num_prompt_tokens=len(choice.tokens),\n",
        f"{FAILOVER}[seeded-penalties]",
    )
    yield one(
        "usage counts what a stop string cut off",
        request,
        "        origins = result.origins[:num_kept]\n",
        "        origins = result.origins\n",
        cut,
    )
