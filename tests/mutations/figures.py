"""Mistakes in what is measured about speculation, and in changing the operator's limits."""

from __future__ import annotations

from collections.abc import Iterator

from tests.mutations.mutation import Mutation, one

FIGURES = "tests/router/test_figures.py::"
REGRET = "tests/router/test_regret.py::"
POLICY = "tests/router/test_run_time_policy.py::"


def figures() -> Iterator[Mutation]:
    counting, derived = "router/figures.py", "specdecode/figures.py"
    yield one(
        "leased steps that come merged are counted as one round",
        counting,
        "num_rounds = 1 if drafted else len(origins)",
        "num_rounds = 1",
        f"{FIGURES}test_histogram_and_emitted_add_up_and_sums_of_parts_are_the_sum",
    )
    yield one(
        "the round that takes in the prompt is timed",
        "router/request.py",
        "None if self._is_opening else now - round_.began",
        "now - round_.began",
        "tests/router/test_request.py::test_a_choices_figures_do_not_time_the_round_that_takes_in_the_prompt",
    )
    yield one(
        "every traffic class has a label of its own",
        counting,
        "if len(self._classes) > MAX_TRAFFIC_CLASSES:",
        "if not self._classes:",
        f"{FIGURES}test_memory_is_bounded_whatever_traffic_classes_come",
    )
    yield one(
        "the theory leaves the bonus out",
        derived,
        "emitted_at, survived = [1.0],",
        "emitted_at, survived = [0.0],",
        f"{FIGURES}test_the_theoretical_speedup_is_the_table_for_measured_alphas_and_c",
    )
    yield one(
        "a rejection is no test of a draft",
        derived,
        "num_tested = self.num_accepted + self.num_recovered",
        "num_tested = self.num_drafted",
        f"{FIGURES}test_counts_of_a_hand_computed_mix_of_rounds",
    )
    yield one(
        "regret forgets the time that drafting takes",
        "router/regret.py",
        "+ idle_share * waited",
        "+ 0.0 * waited",
        f"{REGRET}test_lost_is_what_each_fixed_length_would_emit_more_in_the_time_of_the_decision",
    )


def run_time_policy() -> Iterator[Mutation]:
    path = "router/run_time_policy.py"
    yield one(
        "a limit of one drafter forgets the others'",
        path,
        "dict(policy.min_acceptances) | dict(value)",
        "dict(value)",
        f"{POLICY}test_drafters_that_are_not_named_keep_their_limit",
    )
    yield one(
        "one wrong limit changes the right ones",
        "router/front.py",
        "        after = changed(before, policy_from_proto(request.policy))\n",
        "        from dataclasses import replace\n"
        "        self._router.policy = replace(before, max_temperature=request.policy.max_temperature)\n"
        "        after = changed(before, policy_from_proto(request.policy))\n",
        f"{POLICY}test_bad_limits_are_refused_by_field_and_change_nothing",
    )
    yield one(
        "a changed limit is for new replicas alone",
        "router/router.py",
        "            loop.policy = policy\n",
        "            pass\n",
        f"{POLICY}test_a_limit_holds_for_running_requests_from_the_next_decision_on",
    )
