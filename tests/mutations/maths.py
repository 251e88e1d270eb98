"""Mistakes in what is computed: verification, sampling and noise."""

from __future__ import annotations

from collections.abc import Iterator

from tests.mutations.mutation import (
    DRAFT_MODEL,
    ENUMERATION,
    NOISE,
    ORACLES,
    ROWS,
    SAMPLING,
    SAMPLING_KERNELS,
    Mutation,
    one,
)


def verification() -> Iterator[Mutation]:
    path = "specdecode/verification.py"
    enumerated = f"{ENUMERATION}test_emits_the_targets_distribution"
    yield one(
        "rejection accepts at u·q = p",
        path,
        "(accept_noise * at.q < at.p)",
        "(accept_noise * at.q <= at.p)",
        f"{ENUMERATION}test_acceptance_is_strict",
    )
    yield one(
        "block accepts at u = h",
        path,
        "torch.where(accept_noise < h,",
        "torch.where(accept_noise <= h,",
        f"{ENUMERATION}test_acceptance_is_strict",
    )
    yield one(
        "the recovered token is sampled from p",
        path,
        "weights.scatter_add_(1, support_ids, -q.double())",
        "weights.scatter_add_(1, support_ids, -0.0 * q.double())",
        f"{ENUMERATION}test_recovered_tokens_come_from_the_residual",
    )
    yield one(
        "the residual is q − p",
        path,
        "-q.double()).clamp_(min=0.0)",
        "-q.double()).neg_().clamp_(min=0.0)",
        f"{ENUMERATION}test_recovered_tokens_come_from_the_residual",
    )
    yield one(
        "the bonus is sampled from the last draft's row",
        path,
        "    rows = at.rows.gather(1, accepted[:, None])[:, 0]\n",
        "    rows = at.rows.gather(1, (accepted[:, None] - 1).clamp(min=0))[:, 0]\n",
        f"{enumerated}[rejection-full-1-3]",
    )
    yield one(
        "block stops at its first failure",
        path,
        "    successes = torch.where(accept_noise < h, _positions(drafts) + 1, 0)\n",
        "    successes = (accept_noise < h).long().cumprod(dim=1) * (_positions(drafts) + 1)\n",
        f"{ENUMERATION}test_block_goes_on_after_a_failure",
    )
    yield one(
        "block's reach is not bounded by 1",
        path,
        "(reach[-1] * ratio).clamp(max=1.0)",
        "reach[-1] * ratio",
        f"{enumerated}[block-full-2-3]",
    )
    yield one(
        "block forgets the reach in the residual",
        path,
        "    scale = reach.gather(1, accepted[:, None])[:, 0]\n",
        "    scale = torch.ones_like(sample_noise)\n",
        f"{enumerated}[block-full-2-3]",
    )
    yield one(
        "block looks at the residual before x_i instead of after it",
        path,
        "    h = torch.nn.functional.pad(h[:, 1:], (0, 1))[:, : h.shape[1]]\n",
        "    h = h.clone()\n",
        f"{enumerated}[block-full-2-3]",
    )
    yield one(
        "block's last draft is treated like the others",
        path,
        "    is_last = _positions(drafts) + 1 == drafts.lengths[:, None]\n",
        "    is_last = _positions(drafts) == drafts.lengths[:, None]\n",
        f"{enumerated}[block-full-1-3]",
    )
    yield one(
        "a shorter window takes its neighbours' padding for drafts",
        path,
        "    return _positions(drafts) < drafts.lengths[:, None]  # [B, G]\n",
        "    return _positions(drafts) < drafts.lengths.max()\n",
        f"{ENUMERATION}test_a_ragged_batch_is_its_windows_one_by_one",
    )
    yield one(
        "α is averaged without the weight of having been reached",
        path,
        "    tested = _shifted_right(chances).cumprod(dim=1).masked_fill(~at.valid, 0.0)\n",
        "    tested = at.valid.double()\n",
        f"{ENUMERATION}test_tested_and_passed_are_unbiased",
    )
    yield one(
        "α counts whether this draft was accepted instead of its expectation",
        path,
        "    return Verified(accepted, next_token, tested, (tested * overlaps)",
        "    return Verified(accepted, next_token, tested, (tested * chances)",
        f"{ENUMERATION}test_passed_of_one_position_is_the_overlap_of_p_and_q",
    )


def sampling_kernels() -> Iterator[Mutation]:
    path, rows = "specdecode/lm/cpu/sampling.cpp", "specdecode/lm/cpu/rows.h"
    residual = f"{SAMPLING_KERNELS}test_residual_samples"
    yield one(
        "the kernel's recovered token is sampled from p",
        path,
        "weights[ids[i]] -= q[i];",
        "weights[ids[i]] -= 0.0 * q[i];",
        residual,
        f"{SAMPLING_KERNELS}test_verification_is_the_same_with_them",
    )
    yield one(
        "the kernel's scale of p is forgotten",
        path,
        "weights[i] = p[i] * scale;",
        "weights[i] = p[i];",
        residual,
    )
    yield one(
        "the kernel's nucleus leaves out the token that crosses its border",
        rows,
        "before >= cut.top_p",
        "before + mass > cut.top_p",
        f"{SAMPLING_KERNELS}test_probabilities",
    )
    yield one(
        "the kernel looks for the nucleus no further than two temperatures",
        rows,
        "REACHES[] = {2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 10.0f, 12.0f, 16.0f, INFINITY}",
        "REACHES[] = {2.0f}",
        f"{SAMPLING_KERNELS}test_probabilities",
    )
    yield one(
        "the kernel breaks ties by the highest id",
        rows,
        "a.id < b.id",
        "a.id > b.id",
        f"{SAMPLING_KERNELS}test_ties_go_to_the_lowest_ids",
    )
    yield one(
        "the kernel's noise is that of the next token",
        rows,
        "mixed((token + 1) * GOLDEN + key)",
        "mixed((token + 2) * GOLDEN + key)",
        f"{SAMPLING_KERNELS}test_coupled_picks_are_the_same_tokens",
    )


def sampling() -> Iterator[Mutation]:
    path = "specdecode/sampling.py"
    penalties = f"{SAMPLING}TestPenalties::"
    yield one(
        "penalties of a row do not count the drafts before it",
        path,
        "    seen = committed + drafted.cumsum(dim=0)\n",
        "    seen = committed + drafted * 0\n",
        f"{penalties}test_each_row_counts_committed_tokens_and_earlier_drafts_once",
    )
    yield one(
        "penalties count drafts twice",
        path,
        "    committed = torch.bincount(columns[:num_committed], minlength=len(token_ids))\n",
        "    committed = torch.bincount(columns, minlength=len(token_ids))\n",
        f"{penalties}test_each_row_counts_committed_tokens_and_earlier_drafts_once",
    )
    yield one(
        "penalties of a row count its own draft",
        path,
        "    drafted[torch.arange(1, window.num_rows), columns[num_committed:]] = 1\n",
        "    drafted[torch.arange(window.num_rows - 1), columns[num_committed:]] = 1\n",
        f"{penalties}test_each_row_counts_committed_tokens_and_earlier_drafts_once",
    )
    yield one(
        "penalties of the output count the prompt",
        path,
        "seen.to(device), (seen - prompt).to(device)",
        "seen.to(device), seen.to(device)",
        f"{penalties}test_frequency_counts_and_presence_does_not_both_in_the_output_only",
    )
    yield one(
        "only the first row of a window is adjusted",
        path,
        "_adjust(adjusted[first_row : first_row + window.num_rows], window)",
        "_adjust(adjusted[first_row : first_row + 1], window)",
        f"{SAMPLING}test_a_window_is_its_rows_one_by_one",
        f"{ORACLES}test_text_does_not_depend_on_drafts[greedy-right-3]",
    )
    yield one(
        "min_tokens counts the prompt",
        path,
        "(len(self.token_ids) - self.num_prompt_tokens)",
        "len(self.token_ids)",
        f"{ROWS}test_stop_ids_wait_for_min_tokens_in_every_row",
    )
    yield one(
        "min_tokens holds for the whole window or not at all",
        path,
        "        return min(max(missing, 0), self.num_rows) if self.params.stop_token_ids else 0\n",
        "        return self.num_rows * (missing > 0) if self.params.stop_token_ids else 0\n",
        f"{ROWS}test_stop_ids_wait_for_min_tokens_in_every_row",
        f"{SAMPLING}test_every_row_is_what_the_definitions_say",
    )
    yield one(
        "ties in top-k go to whichever topk returned",
        path,
        "    if len(straddling):\n",
        "    if len(straddling) > len(values):\n",
        f"{SAMPLING}TestTies",
    )
    yield one(
        "ties in top-k go to the highest id",
        path,
        "    column = num_above[rows] + rank\n",
        "    column = num_above[rows] + counts[rows] - 1 - rank\n",
        f"{SAMPLING}TestTies",
    )
    yield one(
        "greedy ties go to the highest id",
        path,
        "    return penalised_logits(logits, windows).max(dim=1).indices\n",
        "    return logits.shape[1] - 1 - penalised_logits(logits, windows).flip(1).max(dim=1).indices\n",
        f"{SAMPLING}TestTies::test_greedy",
    )
    yield one(
        "top-p keeps one token more when it is reached exactly",
        path,
        "    dropped = (before >= columns.top_p) |",
        "    dropped = (before > columns.top_p) |",
        f"{SAMPLING}TestTruncation::test_top_p_reached_exactly_needs_no_more",
    )
    yield one(
        "top-p drops the token that reaches it",
        path,
        "dtype=torch.float64).roll(1, dims=1)\n",
        "dtype=torch.float64)\n",
        f"{SAMPLING}TestTruncation::test_top_p_keeps_the_smallest_prefix_that_reaches_it",
    )
    yield one(
        "top-p looks at untempered probabilities",
        path,
        "    p = torch.softmax(_scaled(logits, columns), dim=1)\n    vocab_size",
        "    p = torch.softmax(logits, dim=1)\n    vocab_size",
        f"{SAMPLING}TestTruncation::test_top_p_looks_at_tempered_probabilities",
    )
    yield one(
        "sampling may return a leading token of probability 0",
        path,
        "    return torch.where(p.gather(1, tokens) > 0, tokens, p.max(dim=1, keepdim=True).indices)[:, 0]\n",
        "    return torch.searchsorted(cumulative, threshold[:, None]).clamp_(max=p.shape[1] - 1)[:, 0]\n",
        f"{SAMPLING}TestInverseCdf",
        f"{ENUMERATION}test_a_coin_of_zero_does_not_accept_a_token_of_probability_zero",
    )
    yield one(
        "a lookup that is not renormalised goes out as q",
        path,
        "    return token_ids, probs / probs.sum(dim=1, keepdim=True)\n",
        "    return token_ids, probs\n",
        f"{SAMPLING}TestRestrictTopK",
    )


def noise() -> Iterator[Mutation]:
    path = "specdecode/noise.py"
    yield one(
        "noise does not depend on the choice",
        path,
        "_mix(key + (choice_index + 1) * to_int64(_GOLDEN))",
        "_mix(key + (0 * choice_index + 1) * to_int64(_GOLDEN))",
        f"{NOISE}test_each_of_the_four_counts",
    )
    yield one(
        "u may be 0",
        path,
        ".double().add_(0.5).mul_(2.0**-52)",
        ".double().mul_(2.0**-52)",
        f"{NOISE}test_pinned_values",
        f"{NOISE}test_is_the_published_hash",
    )
    yield one(
        "u may be 1",
        path,
        ".double().add_(0.5).mul_(2.0**-52)",
        ".double().add_(1.0).mul_(2.0**-52)",
        f"{NOISE}test_pinned_values",
        f"{NOISE}test_is_the_published_hash",
    )
    yield one(
        "target: every choice gets the first one's noise",
        "target_service/verify.py",
        "        choices += [opened.choice_index] * count\n",
        "        choices += [0] * count\n",
        f"{ORACLES}test_text_does_not_depend_on_drafts[coupled-right-1]",
    )
    yield one(
        "drafter: every choice gets the first one's noise",
        "draft_service/model.py",
        "                choices = [sequence.order.choice_index for sequence in sequences]\n",
        "                choices = [0 for sequence in sequences]\n",
        f"{DRAFT_MODEL}test_coupled_drafts_are_the_picks_of_a_target_with_the_same_model",
    )
    yield one(
        "target: noise is keyed by the position in the window",
        "target_service/verify.py",
        "        positions += range(length, length + count)\n",
        "        positions += range(count)\n",
        f"{ORACLES}test_text_does_not_depend_on_drafts[coupled-wrong-1]",
    )
    yield one(
        "target: noise is keyed by the position in the output",
        "target_service/verify.py",
        "        positions += range(length, length + count)\n",
        "        positions += range(work.sequence.num_output, work.sequence.num_output + count)\n",
        f"{ORACLES}test_a_drafter_that_has_the_targets_model_is_never_wrong[coupled-4]",
    )
    yield one(
        "drafter: noise is keyed by the position before",
        "draft_service/drawing.py",
        "    positions = [len(window.token_ids) for window in windows]\n",
        "    positions = [len(window.token_ids) - 1 for window in windows]\n",
        f"{ORACLES}test_a_drafter_that_has_the_targets_model_is_never_wrong[coupled-4]",
    )
