"""What simulated steps and drafts cost: from calibrations, or from a GPU's roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdecode.calibrations import of_this_machine
from specdecode.cost_tables import Calibration, DraftCosts, StepCosts, StepSample
from specdecode.errors import InvalidArgumentError
from specdecode.planner.plan import running
from specdecode.planner.request import PlanTexts
from specdecode.planner.roofline import Replica, RooflineSystem
from specdecode.types import DrafterKind

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_CONTEXTS = (0, 1000, 4000)
_MOST_SEQUENCES = 64
_FEW, _MANY = 1, 257


@dataclass(frozen=True)
class Machine:
    """Costs and bounds of every replica of the fleet.

    Attributes:
        title: what it is.
        steps: what its steps take; the policy is told the same.
        drafts: of each drafter; each replica has one of each.
        max_running: sequences that hold KV at once.
        max_tokens_in_flight: of a step.
        round_trip_seconds: of asking for drafts.
        shares_cores: whether the target does not step while somebody drafts.
    """

    title: str
    steps: StepCosts
    drafts: Mapping[DrafterKind, DraftCosts] = field(default_factory=dict)
    max_running: int = 256
    max_tokens_in_flight: int = 512
    round_trip_seconds: float = 0.001
    shares_cores: bool = False

    def __post_init__(self) -> None:
        for name in ("max_running", "max_tokens_in_flight"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError.of(name, f"{getattr(self, name)} is below 1")
        if not 0 <= self.round_trip_seconds < math.inf:
            raise InvalidArgumentError.of(
                "round_trip_seconds", f"{self.round_trip_seconds} is not at least 0"
            )


def calibrated(paths: Sequence[Path]) -> Machine:
    """By calibration files, the target's and its drafters'; without any by the newest of this machine.

    Raises:
        InvalidArgumentError: a file is damaged, or none is of a target.
    """
    found = [Calibration.load(path) for path in paths] if paths else [of_this_machine()]
    target = next((calibration for calibration in found if calibration.step is not None), None)
    if target is None or target.step is None:
        raise InvalidArgumentError.of("calibration", "none of the files is of a target")
    drafts = {DrafterKind(name): costs for one in found for name, costs in one.drafts.items() if _known(name)}
    return Machine(target.title, target.step, drafts)


def _known(name: str) -> bool:
    return name in [kind.value for kind in DrafterKind]


def roofline(texts: PlanTexts, ngram_seconds: float, context: int) -> Machine:
    """By the planner's roofline of models on GPUs.

    Args:
        texts: models, GPU and how they are cut.
        ngram_seconds: that a look-up takes for a batch; 0: there is none.
        context: tokens of a sequence at its end; as many run as the KV cache holds of these.
    """
    if not 0 <= ngram_seconds < math.inf:
        raise InvalidArgumentError.of("ngram_seconds", f"{ngram_seconds} is not at least 0")
    (option,) = texts.options()
    system = option.system
    if not isinstance(system, RooflineSystem):
        raise InvalidArgumentError.of("gpu", "names no GPU profile")
    drafts = {DrafterKind.MODEL: _draft_costs(system)}
    if ngram_seconds:
        drafts[DrafterKind.NGRAM] = DraftCosts(base_seconds=ngram_seconds, single_pass=True)
    slots = running(system, Machine.max_running, context, with_draft=True)
    return Machine(system.title, _step_costs(system), drafts, max_running=slots)


def _step_costs(system: RooflineSystem) -> StepCosts:
    """Table and fit through a grid of the roofline."""
    target: Replica = system.target
    samples = []
    for size in _SIZES:
        sequences = min(size, _MOST_SEQUENCES)
        for context in _CONTEXTS:
            for rows in {size, max(size // 4, 1)}:
                seconds = target.step_seconds(size, rows, sequences, context, system.form)
                samples.append(StepSample(size, rows, sequences * context, seconds, sequences))
    return StepCosts.of_samples(samples)


def _draft_costs(system: RooflineSystem) -> DraftCosts:
    """A pass costs its weights, each sequence its arithmetic and its KV."""
    few, many, cached = (
        system.draft.step_seconds(*counts, system.form)
        for counts in ((_FEW, _FEW, _FEW, 0), (_MANY, _MANY, _MANY, 0), (_FEW, _FEW, _FEW, 1000))
    )
    token = max(many - few, 0.0) / (_MANY - _FEW)
    return DraftCosts(
        pass_seconds=few - token, token_seconds=token, cached_token_seconds=max(cached - few, 0.0) / 1000
    )
