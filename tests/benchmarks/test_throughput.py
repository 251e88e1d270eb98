"""The plan of the throughput benchmark, and what it makes of its runs."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.prompts import COPY_HEAVY, FREE_FORM, PromptKind, prompts_of
from benchmarks.results import Bar
from benchmarks.schedule import Forecast, Step
from benchmarks.throughput import plan
from benchmarks.throughput_figures import Configuration, Options, Run, Summary, bars_of

OPTIONS = Options(
    concurrencies=(1, 8, 64),
    max_tokens=96,
    repeats=5,
    model="",
    device="cpu",
    dtype="bfloat16",
    threads=2,
    full=False,
)


def test_there_are_64_different_prompts_of_each_kind() -> None:
    for prompts in (COPY_HEAVY, FREE_FORM):
        assert len({prompt.text for prompt in prompts}) == len(prompts) >= 64


def test_repeats_take_other_prompts_until_there_are_no_more() -> None:
    first, second = (prompts_of(PromptKind.FREE_FORM, 8, start) for start in (0, 8))
    assert not {prompt.text for prompt in first} & {prompt.text for prompt in second}
    assert prompts_of(PromptKind.FREE_FORM, 1, len(FREE_FORM)) == [FREE_FORM[0]]


def test_every_turn_runs_each_configuration_of_a_cell_once_and_first_ones_take_turns() -> None:
    runs = [planned for planned in plan(OPTIONS) if not planned.warm_up]
    turns: dict[tuple[PromptKind, int, int], list[Configuration]] = {}
    for planned in runs:
        turn = turns.setdefault((planned.kind, planned.concurrency, planned.repeat), [])
        turn.append(planned.configuration)
    for (kind, _, _), turn in turns.items():
        assert Counter(turn) == Counter(OPTIONS.configurations(kind))
    first = {
        turn[0] for (kind, count, _), turn in turns.items() if kind is PromptKind.FREE_FORM and count == 1
    }
    assert first == set(Configuration)


def test_each_cell_is_warmed_up_before_anything_is_counted() -> None:
    runs = plan(OPTIONS)
    warm = [planned.warm_up for planned in runs]
    assert warm == sorted(warm, reverse=True)
    cells = {(planned.configuration, planned.concurrency) for planned in runs if planned.warm_up}
    assert cells == {(c, count) for c in Configuration for count in OPTIONS.concurrencies}


def test_the_time_left_follows_how_wrong_the_guesses_were() -> None:
    forecast = Forecast()
    steps = [Step("", cell, guess=10.0) for cell in ("a", "a", "b")]
    assert forecast.remaining(steps) == 30.0
    forecast.note(steps[0], 20.0)
    assert forecast.remaining(steps[1:]) == 20.0 + 10.0 * 2


SPEEDS = {
    Configuration.TRANSFORMERS: 10.0,
    Configuration.IN_PROCESS: 16.0,
    Configuration.OFF: 15.0,
    Configuration.NGRAM: 24.0,
}


def _runs(held: int = 0) -> list[Run]:
    """Runs of a machine that is faster in each repeat, for all alike."""
    usage = {"num_emitted": 96, "num_rounds": 40, "num_accepted": 56, "num_drafted": 112}
    return [
        Run(c, kind, count, repeat, 1.0, SPEEDS[c] * (repeat + 1), usage, held, 1.0)
        for count in OPTIONS.concurrencies
        for kind in PromptKind
        for c in OPTIONS.configurations(kind)
        for repeat in range(3)
    ]


def test_ratios_are_taken_turn_by_turn() -> None:
    ratio = Summary(_runs(), OPTIONS).ratio(
        Configuration.OFF, Configuration.TRANSFORMERS, PromptKind.FREE_FORM, 8
    )
    assert (ratio.low, ratio.value, ratio.high) == (1.5, 1.5, 1.5)


def test_every_promise_of_this_benchmark_is_a_bar() -> None:
    runs = _runs()
    found = {bar.name: bar for bar in bars_of(Summary(runs, OPTIONS), runs, {"a": 0.5, "b": 0.9}, OPTIONS)}
    bounds = {name: (bar.value, bar.bound) for name, bar in found.items()}
    for count, bound in ((1, 1.05), (8, 1.2), (64, 1.2)):
        at = f"free-form, {count} at once: services off"
        assert bounds[f"{at} / transformers generate"] == (1.5, bound)
        assert bounds[f"{at} / engine in process"] == pytest.approx((15 / 16, 0.92))
    assert bounds["copy-heavy, 1 at once: n-gram / off"] == pytest.approx((1.6, 1.4))
    assert bounds["KV blocks wasted by a sequence, worst moment"] == (0.9, 1.0)
    assert all(bar.holds for bar in found.values())


def test_a_block_that_is_held_after_a_run_fails() -> None:
    runs = _runs(held=1)
    bars = bars_of(Summary(runs, OPTIONS), runs, {"a": 0.5}, OPTIONS)
    assert [bar for bar in bars if not bar.holds] == [
        Bar("KV blocks still held after a run", 1, 0.0, "at_most")
    ]
