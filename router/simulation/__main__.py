"""`python -m router.simulation`: how a fleet would do under the router's own policy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from router.simulation import report
from router.simulation.fleet import Outcome, simulate
from router.simulation.machine import Machine, calibrated, roofline
from router.simulation.sequence import Way
from router.simulation.workload import Arrivals, SimulatedRequest, read_trace
from specdecode.errors import InvalidArgumentError
from specdecode.planner.request import PlanTexts

_PROGRAM = "specdecode simulate"
_MODELS = ("target", "draft", "tp", "draft_tp", "dtype", "draft_dtype")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, [], False)
        return super()._get_help_string(action) if has_default else action.help


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        _PROGRAM,
        description=(
            "Run a fleet by discrete events: the router's own policy on replicas that are only costs. "
            "Compares ways to decode on the same texts; the same seed gives the same figures."
        ),
        formatter_class=_Help,
        allow_abbrev=False,
    )
    _add_load(parser.add_argument_group("load"))
    _add_machine(parser.add_argument_group("machine"))
    parser.add_argument("--compare", default="off,1,3,5,auto", help="off, auto or γ (1 to 32), comma between")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and texts; at least 0")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rate", type=float, help="requests a second of the fleet; this or --trace is needed")
    group.add_argument(
        "--trace",
        type=Path,
        help=(
            "file, one request a line as JSON: at (seconds), prompt_tokens, max_tokens; "
            "kind (chat or copy), alpha"
        ),
    )
    group.add_argument("--requests", type=int, default=Arrivals.num_requests, help="in all, with --rate")
    group.add_argument(
        "--prompt-tokens", type=int, default=Arrivals.prompt_tokens, help="mean of a request, with --rate"
    )
    group.add_argument(
        "--max-tokens", type=int, default=Arrivals.max_tokens, help="mean of a text, with --rate"
    )
    group.add_argument(
        "--copy-share",
        type=float,
        default=Arrivals.copy_share,
        help="share of requests that copy a lot; 0 to 1",
    )
    group.add_argument(
        "--alpha", type=float, default=Arrivals.alpha, help="mean α of the draft model; 0 to 1"
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--replicas", type=int, default=1, help="of the target, each with its own drafters")
    group.add_argument("--gpu", help="as of specdecode plan; this: the calibration of this machine")
    group.add_argument(
        "--calibration", type=Path, action="append", default=[], help="file of a target or a draft service"
    )
    for name in _MODELS:
        group.add_argument(f"--{name.replace('_', '-')}", help="as of specdecode plan")
    group.add_argument(
        "--ngram-seconds", type=float, default=5e-5, help="seconds a batch's look-up takes; 0: none"
    )
    group.add_argument("--max-running", type=int, help="sequences of a replica at once, below what KV holds")
    group.add_argument(
        "--max-tokens-in-flight", type=int, default=Machine.max_tokens_in_flight, help="tokens of one step"
    )
    group.add_argument(
        "--round-trip-seconds", type=float, default=Machine.round_trip_seconds, help="of asking for drafts"
    )
    group.add_argument("--shares-cores", action="store_true", help="target and drafter take turns")


def _requests(given: argparse.Namespace) -> list[SimulatedRequest]:
    if (given.rate is None) == (given.trace is None):
        raise InvalidArgumentError.of("rate", "give either --rate or --trace")
    if given.trace is not None:
        return read_trace(given.trace, given.alpha)
    return Arrivals(
        rate=given.rate,
        num_requests=given.requests,
        prompt_tokens=given.prompt_tokens,
        max_tokens=given.max_tokens,
        copy_share=given.copy_share,
        alpha=given.alpha,
    ).requests(given.seed)


def _machine(given: argparse.Namespace, context: int) -> Machine:
    if given.calibration or (given.gpu or "").lower() == "this":
        found = calibrated(given.calibration)
    else:
        texts = PlanTexts(gpu=given.gpu, **{name: getattr(given, name) for name in _MODELS})
        found = roofline(texts, given.ngram_seconds, context)
    return replace(
        found,
        max_running=found.max_running if given.max_running is None else given.max_running,
        max_tokens_in_flight=given.max_tokens_in_flight,
        round_trip_seconds=given.round_trip_seconds,
        shares_cores=given.shares_cores,
    )


def _print(outcomes: Sequence[Outcome], machine: Machine, given: argparse.Namespace) -> None:
    if given.json:
        ways = [report.document(outcome) for outcome in outcomes]
        about = {"machine": machine.title, "replicas": given.replicas, "seed": given.seed}
        print(json.dumps(about | {"ways": ways}, ensure_ascii=False))
        return
    console = Console(highlight=False)
    served = outcomes[0].served
    title = f"{given.replicas} × {machine.title}, {len(served)} requests, seed {given.seed}"
    console.print(title, style="bold", markup=False, soft_wrap=True)
    console.print(report.table(outcomes))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; the exit code: 2 for what was asked wrongly."""
    given = _parser().parse_args(argv)
    try:
        if given.seed < 0:
            raise InvalidArgumentError.of("seed", f"{given.seed} is below 0")
        ways = [Way.of(text.strip()) for text in given.compare.split(",")]
        requests = _requests(given)
        machine = _machine(given, max(one.prompt_tokens + one.max_tokens for one in requests))
        outcomes = [simulate(requests, machine, way, given.replicas, given.seed) for way in ways]
    except InvalidArgumentError as error:
        print(f"{_PROGRAM}: {error.message}", file=sys.stderr)
        return 2
    _print(outcomes, machine, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
