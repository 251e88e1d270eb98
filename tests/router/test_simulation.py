from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from router.reasons import DecisionReason
from router.simulation import report
from router.simulation.__main__ import main
from router.simulation.fleet import Outcome, simulate
from router.simulation.machine import Machine, calibrated, roofline
from router.simulation.sequence import Way
from router.simulation.workload import Arrivals, SimulatedRequest, TextOdds, read_trace
from specdecode.cost_tables import Calibration, DraftCosts, StepCosts
from specdecode.errors import InvalidArgumentError
from specdecode.planner.request import PlanTexts
from specdecode.types import DrafterKind

DRAFTS = {
    DrafterKind.MODEL: DraftCosts(pass_seconds=5e-4, token_seconds=1e-6),
    DrafterKind.NGRAM: DraftCosts(base_seconds=5e-5, single_pass=True),
}
MEMORY_BOUND = Machine("memory-bound", StepCosts(0.020, 1e-6), DRAFTS, round_trip_seconds=2e-4)
COMPUTE_BOUND = Machine("compute-bound", StepCosts(1e-5, 1e-3), DRAFTS, round_trip_seconds=2e-4)
LOAD = Arrivals(rate=50, num_requests=40, prompt_tokens=50, max_tokens=100)
OFF, AUTO = Way.of("off"), Way.of("auto")
WAYS = [OFF, Way.of("3"), AUTO]


def run(machine: Machine, way: Way, load: Arrivals = LOAD, replicas: int = 2, seed: int = 1) -> Outcome:
    return simulate(load.requests(seed), machine, way, replicas, seed)


def test_the_same_seed_gives_the_same_outcome_to_the_last_digit() -> None:
    first, second = (run(MEMORY_BOUND, AUTO) for _ in range(2))
    assert first == second
    assert first != run(MEMORY_BOUND, AUTO, seed=2)


def test_where_tokens_in_flight_are_free_the_policy_drafts_and_beats_off_and_a_fixed_length() -> None:
    off, fixed, auto = (run(MEMORY_BOUND, way) for way in WAYS)
    assert auto.mean_draft_tokens > 3
    assert auto.mean_token_seconds < 0.5 * off.mean_token_seconds
    assert auto.mean_token_seconds < fixed.mean_token_seconds
    assert auto.throughput > 1.3 * off.throughput


def test_where_every_token_in_flight_costs_as_much_as_the_first_the_policy_is_as_fast_as_off() -> None:
    off, fixed, auto = (run(COMPUTE_BOUND, way) for way in WAYS)
    assert auto.throughput == pytest.approx(off.throughput, rel=0.01)
    assert auto.mean_draft_tokens < 0.02
    assert fixed.throughput < 0.95 * off.throughput


@pytest.mark.parametrize("machine", [MEMORY_BOUND, COMPUTE_BOUND], ids=lambda machine: machine.title)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_request_ends_with_exactly_its_tokens(machine: Machine, way: Way) -> None:
    crowded = replace(machine, max_running=3, max_tokens_in_flight=16)
    outcome = run(crowded, way)
    requests = LOAD.requests(1)
    assert sorted(one.request.index for one in outcome.served) == list(range(len(requests)))
    assert all(one.num_output == one.request.max_tokens for one in outcome.served)
    assert all(one.request.at < one.first_token_at <= one.ended_at for one in outcome.served)
    tally = outcome.tally
    assert tally.num_emitted == sum(request.max_tokens for request in requests)
    assert tally.num_emitted == tally.num_rounds + tally.num_accepted
    assert sum(tally.reasons.values()) == tally.num_rounds


def test_a_replica_never_works_more_than_all_the_time() -> None:
    for way in WAYS:
        assert all(0 < share <= 1 + 1e-9 for share in run(MEMORY_BOUND, way).utilisation)


def test_one_plain_request_takes_its_prefill_and_one_step_for_each_token() -> None:
    request = SimulatedRequest(0, 0.0, prompt_tokens=257, max_tokens=10, kind="chat", alpha=0.5)
    outcome = simulate([request], replace(COMPUTE_BOUND, max_tokens_in_flight=512), OFF)
    # 256 prompt tokens are computed in the step of the first window.
    assert outcome.seconds == pytest.approx((1e-5 + 257e-3) + 9 * (1e-5 + 1e-3))


def test_one_forced_request_takes_what_its_rounds_cost() -> None:
    request = SimulatedRequest(0, 0.0, prompt_tokens=1, max_tokens=9, kind="chat", alpha=1.0)
    machine = Machine("x", StepCosts(0.010, 0.001), {DrafterKind.MODEL: DraftCosts(pass_seconds=0.002)}, 1)
    outcome = simulate([request], replace(machine, round_trip_seconds=0.005), Way.of("3"))
    rounds = [0.011, 0.006 + 0.005 + 0.014, 0.006 + 0.005 + 0.014]
    assert outcome.seconds == pytest.approx(sum(rounds))
    assert outcome.tally.num_accepted == 6


def test_arrivals_go_to_the_replica_with_the_fewest() -> None:
    requests = [SimulatedRequest(i, 0.0, 1, 10, "chat", 0.5) for i in range(12)]
    outcome = simulate(requests, MEMORY_BOUND, OFF, num_replicas=4)
    assert len({round(share, 9) for share in outcome.utilisation}) == 1


def test_a_drafter_that_misses_its_deadline_costs_no_more_than_the_deadline() -> None:
    drafts = {DrafterKind.MODEL: DraftCosts(pass_seconds=5.0)}
    outcome = run(Machine("late", StepCosts(0.020, 1e-6), drafts), Way.of("1"), replace(LOAD, num_requests=3))
    assert outcome.tally.reasons[DecisionReason.DRAFTER_LATE] > 0
    assert outcome.tally.num_drafted == 0
    assert all(one.num_output == one.request.max_tokens for one in outcome.served)


def test_drafts_are_accepted_as_often_as_the_requests_own_alpha_says() -> None:
    request = SimulatedRequest(3, 0.0, 1, 20_000, "chat", 0.7)
    runs = TextOdds.of(request, seed=5).runs[DrafterKind.MODEL]
    share = sum(length > 0 for length in runs) / len(runs)
    assert share == pytest.approx(0.7, abs=0.015)
    assert sum(length > 1 for length in runs) / len(runs) == pytest.approx(0.49, abs=0.02)


def test_look_ups_find_more_of_texts_that_copy() -> None:
    found = {}
    for kind in ("copy", "chat"):
        runs = TextOdds.of(SimulatedRequest(0, 0.0, 1, 5000, kind, 0.5), 0).runs[DrafterKind.NGRAM]
        found[kind] = sum(length > 0 for length in runs) / len(runs)
    assert found["copy"] > 0.6 > 0.35 > found["chat"]


# Machines


def test_a_roofline_machine_has_the_planners_step_times() -> None:
    texts = PlanTexts(target="8B", draft="1B", gpu="h100")
    machine = roofline(texts, 5e-5, context=1000)
    (option,) = texts.options()
    for batch, gamma in ((1, 0), (16, 3), (64, 7)):
        tokens = batch * (gamma + 1)
        planned = option.system.steps(batch, 1000, gamma or 1).step(tokens)
        assert machine.steps.step(tokens, tokens, batch * 1000, batch) == pytest.approx(planned, rel=0.05)
        drafted = option.system.drafts(batch, 1000).round([gamma] * batch)
        own = machine.drafts[DrafterKind.MODEL].round([gamma] * batch, [1000.0] * batch)
        assert own == pytest.approx(drafted, rel=0.05)


def test_calibrations_of_a_target_and_a_drafter_make_a_machine(tmp_path: Path) -> None:
    target, draft = tmp_path / "target.json", tmp_path / "draft.json"
    Calibration(
        {"role": "target", "model": "m", "dtype": "bfloat16", "device": "d"}, MEMORY_BOUND.steps
    ).save(target)
    Calibration({"role": "draft"}, None, {"ngram": DRAFTS[DrafterKind.NGRAM]}).save(draft)
    machine = calibrated([target, draft])
    assert machine.title == "m (bfloat16) on d"
    assert machine.steps == MEMORY_BOUND.steps
    assert machine.drafts == {DrafterKind.NGRAM: DRAFTS[DrafterKind.NGRAM]}
    with pytest.raises(InvalidArgumentError, match="none of the files is of a target"):
        calibrated([draft])


# What is asked wrongly

GOOD = {"at": 1.0, "prompt_tokens": 5, "max_tokens": 6}


def trace_of(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_trace_is_read_with_its_defaults(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "t", GOOD, "", GOOD | {"at": 2, "kind": "copy", "alpha": 0.9})
    assert read_trace(path, alpha=0.6) == [
        SimulatedRequest(0, 1.0, 5, 6, "chat", 0.6),
        SimulatedRequest(1, 2.0, 5, 6, "copy", 0.9),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GOOD | {"at": 0.5}, "at: 0.5 is before the line above, 1: time goes backwards"),
        (GOOD | {"at": -1}, "at: -1 is below 0"),
        (GOOD | {"at": "1"}, "at: '1' is not a finite number"),
        ('{"at": NaN, "prompt_tokens": 1, "max_tokens": 1}', "at: nan is not a finite number"),
        (GOOD | {"size": 3}, "size: is none of at, prompt_tokens"),
        ({"at": 1, "prompt_tokens": 5}, "max_tokens: is missing"),
        (GOOD | {"max_tokens": 0}, "max_tokens: 0 is not a whole number of 1"),
        (GOOD | {"prompt_tokens": 2.5}, "prompt_tokens: 2.5 is not a whole number"),
        (GOOD | {"kind": "poem"}, "kind: 'poem' is none of chat, copy"),
        (GOOD | {"kind": []}, "kind: .* is none of chat, copy"),
        (GOOD | {"alpha": 1.5}, "alpha: 1.5 is outside"),
        ("{", "line: is not JSON"),
        ("[1]", "line: is not a JSON object"),
    ],
)
def test_a_bad_line_of_a_trace_is_named_with_its_field(tmp_path: Path, line: object, message: str) -> None:
    path = trace_of(tmp_path / "t", GOOD, line)
    with pytest.raises(InvalidArgumentError, match=f"trace: .* line 2: {message}"):
        read_trace(path)


def test_an_empty_trace_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="holds no request"):
        read_trace(trace_of(tmp_path / "t", ""))
    with pytest.raises(InvalidArgumentError, match="can't be read"):
        read_trace(tmp_path / "none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate -1", "rate: -1.0 is not a finite number above 0"),
        ("--rate nan", "rate: nan"),
        ("--rate 1 --replicas 0", "replicas: 0 is outside [1,"),
        ("--rate 1 --requests 0", "num_requests: 0"),
        ("--rate 1 --alpha 2", "alpha: 2.0 is outside [0, 1]"),
        ("--rate 1 --compare off,0", "compare: '0'"),
        ("--rate 1 --max-running 0", "max_running: 0 is below 1"),
        ("--rate 1 --round-trip-seconds -1", "round_trip_seconds: -1.0"),
        ("--rate 1 --ngram-seconds nan", "ngram_seconds: nan"),
        ("--rate 1 --gpu abacus", "gpu: 'abacus'"),
        ("--rate 1 --seed -1", "seed: -1 is below 0"),
        ("", "rate: give either --rate or --trace"),
    ],
)
def test_bad_arguments_are_one_line_with_the_field(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert f"specdecode simulate: {message}" in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not captured.out


# The command


def test_specdecode_simulate_runs_the_simulator_in_a_process_of_its_own() -> None:
    arguments = ["--rate=20", "--requests=5", "--max-tokens=20", "--compare=off,auto", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "specdecode.cli", "simulate", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout)
    assert [way["way"] for way in found["ways"]] == ["off", "auto"]
    assert found["ways"][0]["num_emitted"] == found["ways"][1]["num_emitted"] > 0


def test_the_table_has_a_column_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [run(MEMORY_BOUND, way, replace(LOAD, num_requests=3)) for way in WAYS]
    table = report.table(outcomes)
    assert [column.header for column in table.columns] == ["", "off", "γ = 3", "auto"]
    console = Console(width=60, file=io.StringIO(), color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    assert "…" not in console.file.getvalue()
    assert main(["--rate=20", "--requests=3", "--max-tokens=20", "--compare=off"]) == 0
    assert "tokens/s" in capsys.readouterr().out
