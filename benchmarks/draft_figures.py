"""What the runs of the draft benchmark say: acceptance by kind of prompt, a step's cost, auto against off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.pictures import Panel
from benchmarks.results import Bar, Estimate, bar_of, median_of, paired_ratio, pooled_ratio

AUTO, OFF = "auto", "off"
LEAST_EMITTED, LEAST_ALPHA, MOST_OF_A_STEP = 1.9, 0.5, 0.12
LEAST_OF_OFF = 0.98


class Kind(StrEnum):
    """What is asked for."""

    CHAT = "chat"
    CODE = "code"
    COPY_HEAVY = "copy-heavy"


class Load(StrEnum):
    """What goes through the services, one at a time."""

    CHAT = "chat, temperature 0"
    SAMPLED = "chat, sampled"
    CODE = "code, temperature 0"
    COPY_HEAVY = "copy-heavy, temperature 0"

    @property
    def kind(self) -> Kind:
        """Of its prompts."""
        return Kind(self.value.partition(",")[0])


LEAST_AUTO = {Load.CHAT: 1.25, Load.COPY_HEAVY: 1.6}
"""Auto over off; others `LEAST_OF_OFF`."""


@dataclass(frozen=True)
class AcceptanceRun:
    """One prompt's rounds, all drafted by the model alone.

    Attributes:
        tested, passed: Σ over rounds, by draft position; α_i is their ratio.
    """

    kind: str
    temperature: float
    prompt: int
    num_rounds: int
    num_emitted: int
    tested: list[float]
    passed: list[float]


@dataclass(frozen=True)
class StepRun:
    """One turn: a draft step beside a plain step of the target, milliseconds."""

    method: str
    turn: int
    draft: float
    target: float


@dataclass(frozen=True)
class ServiceRun:
    """One run through the services."""

    configuration: str
    load: str
    repeat: int
    seconds: float
    tokens_per_second: float
    num_rounds: int
    num_drafted: int
    num_accepted: int


class DraftFigures:
    """Estimates and bars."""

    def __init__(
        self,
        acceptance: Sequence[AcceptanceRun],
        steps: Sequence[StepRun],
        services: Sequence[ServiceRun],
    ) -> None:
        self._acceptance = acceptance
        self._steps = steps
        self._services = sorted(services, key=lambda run: run.repeat)
        self.temperatures = sorted({run.temperature for run in acceptance})
        self.methods = list(dict.fromkeys(run.method for run in steps))
        self.loads = [load for load in Load if any(run.load == load for run in services)]

    def _accepted(self, kind: Kind, temperature: float) -> list[AcceptanceRun]:
        return [run for run in self._acceptance if (run.kind, run.temperature) == (kind, temperature)]

    def emitted(self, kind: Kind, temperature: float) -> Estimate:
        """Tokens a round."""
        runs = self._accepted(kind, temperature)
        return pooled_ratio([run.num_emitted for run in runs], [run.num_rounds for run in runs])

    def alphas(self, kind: Kind, temperature: float) -> list[Estimate]:
        """α by draft position, as far as any draft was reached."""
        runs = self._accepted(kind, temperature)
        passed, tested = (
            zip(*(run.passed for run in runs), strict=True),
            zip(*(run.tested for run in runs), strict=True),
        )
        return [pooled_ratio(own, of) for own, of in zip(passed, tested, strict=True) if any(of)]

    def step_ratio(self, method: str) -> Estimate:
        """Draft step over target step, turn by turn."""
        runs = [run for run in self._steps if run.method == method]
        return paired_ratio([run.draft for run in runs], [run.target for run in runs])

    def speeds(self, load: Load) -> dict[str, list[float]]:
        """Tokens a second of each configuration, by turn."""
        return {
            name: [r.tokens_per_second for r in self._services if (r.load, r.configuration) == (load, name)]
            for name in (OFF, AUTO)
        }

    def against_off(self, load: Load) -> Estimate:
        """Auto over off, turn by turn."""
        speeds = self.speeds(load)
        return paired_ratio(speeds[AUTO], speeds[OFF])

    def to_json(self) -> dict[str, Any]:
        """All estimates."""
        return {
            "acceptance": [
                {
                    "kind": kind,
                    "temperature": temperature,
                    "emitted_per_round": self.emitted(kind, temperature).to_json(),
                    "alpha_by_position": [alpha.to_json() for alpha in self.alphas(kind, temperature)],
                }
                for kind in Kind
                for temperature in self.temperatures
            ],
            "step": [
                {
                    "method": method,
                    "draft_ms": median_of([r.draft for r in self._steps if r.method == method]).to_json(),
                    "target_ms": median_of([r.target for r in self._steps if r.method == method]).to_json(),
                    "draft / target": self.step_ratio(method).to_json(),
                }
                for method in self.methods
            ],
            "services": [
                {
                    "load": load,
                    "tokens_per_second": {n: median_of(v).to_json() for n, v in self.speeds(load).items()},
                    "auto / off": self.against_off(load).to_json(),
                    "accepted_of_drafted": self._accepted_share(load),
                }
                for load in self.loads
            ],
        }

    def _accepted_share(self, load: Load) -> float:
        runs = [run for run in self._services if run.load == load and run.configuration == AUTO]
        return round(sum(r.num_accepted for r in runs) / max(sum(r.num_drafted for r in runs), 1), 4)

    def bars(self) -> list[Bar]:
        """What is promised of the shipped draft."""
        cold, hot = self.temperatures[0], self.temperatures[-1]
        emitted = self.emitted(Kind.CHAT, cold)
        alpha = self.alphas(Kind.CHAT, hot)[0]
        bars = [
            bar_of(f"chat, temperature {cold:g}: emitted a round, γ = 4", emitted, LEAST_EMITTED, "at_least"),
            bar_of(f"chat, temperature {hot:g}: α of the first draft", alpha, LEAST_ALPHA, "at_least"),
        ]
        for method in self.methods:
            name = f"{method}: a draft step / a plain step of the target"
            bars.append(bar_of(name, self.step_ratio(method), MOST_OF_A_STEP, "at_most"))
        for load in self.loads:
            bound = LEAST_AUTO.get(load, LEAST_OF_OFF)
            bars.append(bar_of(f"{load}, 1 at once: auto / off", self.against_off(load), bound, "at_least"))
        return bars

    def panels(self) -> list[list[Panel]]:
        """Emitted a round and α by position; the step's cost; speeds."""
        emitted = {
            kind.value: {f"temperature {t:g}": self.emitted(kind, t) for t in self.temperatures}
            for kind in Kind
        }
        hot = self.temperatures[-1]
        alphas = {kind: self.alphas(kind, hot) for kind in Kind}
        by_position = {
            str(i): {kind.value: own[i] for kind, own in alphas.items() if i < len(own)}
            for i in range(max(map(len, alphas.values())))
        }
        steps = {method: {"draft step / target step": self.step_ratio(method)} for method in self.methods}
        against = {
            load.value.replace(", ", "\n"): {"auto / off": self.against_off(load)} for load in self.loads
        }
        return [
            [
                Panel("tokens emitted a round, γ = 4", emitted),
                Panel(f"α by draft position, temperature {hot:g}", by_position),
            ],
            [Panel("cost of a draft step", steps), Panel("through the services, 1 at once", against)],
        ]
