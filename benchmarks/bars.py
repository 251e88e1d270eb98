"""`make bars`: every bar of every file in docs/results that does not hold; exit code 1 if there is one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.results import RESULTS, Bar, read_bars


def describe(bar: Bar) -> str:
    """One line: does it hold, what was measured, what was promised."""
    interval = f" [{bar.interval[0]:.4g}, {bar.interval[1]:.4g}]" if bar.interval else ""
    sign = "≥" if bar.direction == "at_least" else "≤"
    verdict = "holds" if bar.holds else "FAILS"
    return f"{verdict}  {bar.name}: {bar.value:.4g}{interval}, bar {sign} {bar.bound:g}"


def main() -> int:
    """Prints the bars; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bars", description=__doc__)
    parser.add_argument("--all", action="store_true", help="print those that hold as well")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory (default: docs/results)")
    options = parser.parse_args()
    bars = read_bars(options.results)
    failing = sum(not bar.holds for _, bar in bars)
    for file, bar in bars:
        if options.all or not bar.holds:
            print(f"{file}: {describe(bar)}")
    print(f"{len(bars) - failing} of {len(bars)} bars hold")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
