"""How repeats are spread over points and a budget, by a clock that the measured points move."""

from __future__ import annotations

import logging

import pytest

from specdecode.errors import InvalidArgumentError
from specdecode.measuring import InterleavedMedians, run_logged


class Bench:
    """Points that take the seconds of their names, and a note of who ran."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.now = 0.0
        self.ran: list[str] = []
        self._seconds = {name: list(values) for name, values in seconds.items()}

    def measure(self, name: str) -> float:
        values = self._seconds[name]
        seconds = values.pop(0) if len(values) > 1 else values[0]
        self.now += seconds
        self.ran.append(name)
        return seconds

    def medians(self, budget: float) -> InterleavedMedians[str]:
        return InterleavedMedians(list(self._seconds), self.measure, budget, lambda: self.now)


def finish(medians: InterleavedMedians[str]) -> dict[str, float]:
    while medians.progress < 1:
        medians.advance()
    return medians.medians()


def test_repeats_go_over_all_points_in_turn() -> None:
    bench = Bench({"a": [1.0], "b": [1.0], "c": [1.0]})
    finish(bench.medians(12.0))
    assert bench.ran == list("abc" * 4)


def test_the_first_repeat_only_warms_up_and_medians_ignore_an_outlier() -> None:
    bench = Bench({"a": [5.0, 1.0, 9.0, 1.0], "b": [1.0]})
    assert finish(bench.medians(40.0))["a"] == 1.0


def test_repeats_that_something_held_up_do_not_count_however_many_they_are() -> None:
    bench = Bench({"a": [1.2, 9.0, 1.1, 9.0, 1.3, 9.0, 9.0], "b": [1.0]})
    assert finish(bench.medians(45.0))["a"] == pytest.approx(1.2)


def test_of_two_values_the_smaller_one_counts() -> None:
    bench = Bench({"a": [4.0, 3.0], "b": [4.0, 3.5]})
    assert finish(bench.medians(14.0)) == {"a": 3.0, "b": 3.5}


def test_a_first_repeat_ends_with_its_third_of_the_budget_and_later_ones_go_on_where_it_stopped() -> None:
    cold = {name: [10.0, 1.0] for name in "abcdef"}
    bench = Bench(cold)
    medians = finish(bench.medians(90.0))
    assert bench.ran[:4] == list("abca")
    assert medians == dict.fromkeys("abcdef", 1.0)


def test_points_that_are_too_expensive_are_measured_last_and_not_at_all_if_there_is_no_time() -> None:
    bench = Bench({"a": [1.0], "b": [1.0], "c": [1.0], "d": [20.0], "e": [20.0]})
    assert finish(bench.medians(9.0)).keys() == {"a", "b", "c"}
    assert bench.ran == list("abc" * 3)


def test_a_point_that_was_measured_once_does_not_count_beside_others() -> None:
    bench = Bench({"a": [1.0], "b": [1.0], "c": [8.0]})
    assert finish(bench.medians(12.0)).keys() == {"a", "b"}
    assert bench.ran == list("abc" + "ab")


def test_two_points_are_measured_whatever_the_budget() -> None:
    bench = Bench({"a": [9.0], "b": [9.0], "c": [9.0]})
    assert finish(bench.medians(0.001)) == {"a": 9.0, "b": 9.0}


def test_no_repeat_goes_on_beyond_the_budget() -> None:
    bench = Bench({"a": [1.0, 50.0], "b": [1.0, 50.0], "c": [1.0, 50.0]})
    assert finish(bench.medians(20.0)) == {"a": 1.0, "b": 1.0}
    assert bench.ran == list("abc" + "ab")


def test_time_between_two_pieces_is_not_counted() -> None:
    bench = Bench({"a": [1.0], "b": [1.0]})
    medians = bench.medians(8.0)
    while medians.progress < 1:
        medians.advance()
        bench.now += 1000.0
    assert len(bench.ran) == 8


def test_repeats_end_even_if_they_cost_nothing() -> None:
    bench = Bench({"a": [1e-9], "b": [1e-9]})
    finish(bench.medians(1000.0))
    assert len(bench.ran) == 30


def test_progress_rises_to_one_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    medians = Bench({"a": [1.0], "b": [1.0]}).medians(20.0)
    with caplog.at_level(logging.INFO):
        run_logged(medians, "measuring")
    shares = [float(record.args[1]) for record in caplog.records[1:] if isinstance(record.args, tuple)]
    assert shares == sorted(shares)
    assert shares[-1] == 100.0
    assert len(shares) >= 4


@pytest.mark.parametrize(
    ("points", "seconds", "field"), [(1, 1.0, "points"), (2, 0.0, "seconds"), (2, -1.0, "seconds")]
)
def test_a_line_through_one_point_and_no_budget_are_refused(points: int, seconds: float, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        InterleavedMedians(list(range(points)), lambda point: 1.0, seconds)
