"""One convention for the figures of every benchmark: docs/results/NAME.json, and a picture NAME.png.

The file holds all raw runs, so that every figure in it can be computed again, and `bars`: what was promised
about the figures, and whether it holds (`make bars` prints those that don't). Ratios are always taken from
runs that were interleaved in one session, pair by pair: what slowed the machine down slowed both.

    session = begin("throughput", settings)
    ...
    session.write(directory, runs, summary, bars, draw)
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
QUICK_RESULTS = ROOT / "build" / "results"
"""Where quick runs write: their figures are no results."""

Direction = Literal["at_least", "at_most"]

_RESAMPLES = 10_000
_PACKAGES = ("torch", "transformers", "grpcio", "specdecode")


@dataclass(frozen=True)
class Estimate:
    """A median or a rate with its 95 % interval; of one run the interval is its value."""

    value: float
    low: float
    high: float
    num_samples: int

    def to_json(self) -> dict[str, Any]:
        return {"value": _rounded(self.value), "interval": self.interval, "num_samples": self.num_samples}

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval."""
        return _rounded(self.low), _rounded(self.high)


@dataclass(frozen=True)
class Bar:
    """A promise about one figure.

    Attributes:
        name: what is measured, readable on its own.
        interval: 95 % interval of the value, where it has one. The bar is judged by the value.
    """

    name: str
    value: float
    bound: float
    direction: Direction
    interval: tuple[float, float] | None = None

    @property
    def holds(self) -> bool:
        """Whether the value is on the promised side; a NaN never is."""
        return self.value >= self.bound if self.direction == "at_least" else self.value <= self.bound

    def to_json(self) -> dict[str, Any]:
        bar: dict[str, Any] = {
            "name": self.name,
            "value": _rounded(self.value),
            "bound": self.bound,
            "direction": self.direction,
            "holds": self.holds,
        }
        if self.interval is not None:
            bar["interval"] = self.interval
        return bar


def bar_of(name: str, estimate: Estimate, bound: float, direction: Direction) -> Bar:
    """A bar on an estimate."""
    return Bar(name, estimate.value, bound, direction, estimate.interval)


def median_of(values: Sequence[float]) -> Estimate:
    """Median of runs that mean the same.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("no runs")
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(0).integers(len(data), size=(_RESAMPLES, len(data)))
    low, high = np.percentile(np.median(data[picks], axis=1), (2.5, 97.5))
    return Estimate(float(np.median(data)), float(low), float(high), len(data))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Median of the ratios of runs that were made in turn: pair i is numerators[i], denominators[i]."""
    return median_of([above / below for above, below in zip(numerators, denominators, strict=True)])


def pooled_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Σ numerators / Σ denominators of samples that mean the same, such as one a prompt.

    Raises:
        ValueError: the denominators are all 0.
    """
    above, below = (np.asarray(values, dtype=np.float64) for values in (numerators, denominators))
    if not below.any():
        raise ValueError("nothing to divide by")
    picks = np.random.default_rng(0).integers(len(above), size=(_RESAMPLES, len(above)))
    totals = below[picks].sum(axis=1)
    # A resample may hold none of the few samples that have anything.
    low, high = np.percentile((above[picks].sum(axis=1)[totals > 0] / totals[totals > 0]), (2.5, 97.5))
    return Estimate(float(above.sum() / below.sum()), float(low), float(high), len(above))


def rate_of(count: int, total: int, per: float = 1.0) -> Estimate:
    """Share of `total` trials, times `per`, with Wilson's interval, which has a width at 0 of n too."""
    share, z = count / total, 1.96
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    low, high = max(centre - half, 0.0), min(centre + half, 1.0)
    return Estimate(share * per, min(low, share) * per, max(high, share) * per, total)


@dataclass(frozen=True)
class Session:
    """A benchmark that has begun: what was known then."""

    name: str
    settings: Mapping[str, Any]
    started: datetime
    machine: Mapping[str, Any]

    def write(
        self,
        directory: Path,
        runs: Sequence[Mapping[str, Any]],
        summary: Mapping[str, Any],
        bars: Sequence[Bar],
        draw: Callable[[Path], None],
    ) -> Path:
        """Writes NAME.json and, through `draw`, NAME.png; the path of the former."""
        content = {
            "name": self.name,
            "machine": self.machine,
            "versions": _versions(),
            "command": _command(),
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round((datetime.now(UTC) - self.started).total_seconds(), 1),
            "settings": self.settings,
            "summary": summary,
            "bars": [bar.to_json() for bar in bars],
            "runs": runs,
        }
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        path.write_text(_dump(content) + "\n")
        draw(path.with_suffix(".png"))
        return path


def begin(name: str, settings: Mapping[str, Any]) -> Session:
    """Notes time, machine and its load before anything is measured."""
    return Session(name, settings, datetime.now(UTC), _machine())


def read_bars(directory: Path = RESULTS) -> list[tuple[str, Bar]]:
    """(file's name, bar) of every bar of every result, by file."""
    found = []
    for path in sorted(directory.glob("*.json")):
        for bar in json.loads(path.read_text())["bars"]:
            interval = tuple(bar["interval"]) if "interval" in bar else None
            found.append(
                (path.stem, Bar(bar["name"], bar["value"], bar["bound"], bar["direction"], interval))
            )
    return found


def _dump(value: Any, depth: int = 0) -> str:
    """JSON with a line for each part, and for each item of a list of objects: changes are seen in a diff."""
    indent = " " * (depth + 1)
    if isinstance(value, Mapping) and value and depth <= 1:
        parts = [f"{json.dumps(str(name))}: {_dump(part, depth + 1)}" for name, part in value.items()]
        opening, closing = "{", "}"
    elif isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
        parts = [_dump(part, depth=2) for part in value]
        opening, closing = "[", "]"
    else:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return f"{opening}\n{indent}" + f",\n{indent}".join(parts) + f"\n{indent[1:]}{closing}"


def _rounded(value: float) -> float:
    """Six digits: more than any figure here has, few enough to read."""
    return float(f"{value:.6g}")


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpu": _gpu_model(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown")


def _gpu_model() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _versions() -> dict[str, str]:
    versions = {package: metadata.version(package) for package in _PACKAGES}
    return {"python": platform.python_version(), **versions, "commit": _commit()}


def _commit() -> str:
    """The checkout's commit, with `-dirty` where files other than results differ from it."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _command() -> str:
    return shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
