"""What `specdecode plan` is asked for: texts of options to systems, drafts, batches and contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from specdecode.cost import Calibration, survivals
from specdecode.errors import InvalidArgumentError
from specdecode.planner.hardware import HardwareProfile, hardware_profile
from specdecode.planner.plan import DraftOption, FixedDraftCost, MeasuredSystem, Question, System
from specdecode.planner.roofline import Form, Replica, RooflineSystem
from specdecode.planner.shapes import ModelShape, model_shape
from specdecode.types import MAX_DRAFT_TOKENS

ASSUMED_ALPHA = 0.8
_DEFAULT_LENGTH = 8
_SHOWN_LENGTHS = (1, 2, 3, 5, 7)
_GROUPS = (1, 2, 4, 8, 16, 32, 64)
_LARGEST = 1_000_000
_WEIGHT_SHARE = 0.6
"""Of a GPU's memory that weights fill at most where the number of GPUs is ours to choose."""
_THIS = "this"

T = TypeVar("T")


@dataclass(frozen=True)
class PlanTexts:
    """Options as they were given; None: not given."""

    alphas: str | None = None
    draft_cost: str | None = None
    target: str | None = None
    draft: str | None = None
    drafts: str | None = None
    gpu: str | None = None
    calibration: str | None = None
    tp: str | None = None
    draft_tp: str | None = None
    dtype: str | None = None
    draft_dtype: str | None = None
    kv_dtype: str | None = None
    context: str | None = None
    batch: str | None = None
    form: str | None = None
    max_draft_tokens: str | None = None
    fixed: str | None = None
    idle_share: str | None = None

    @property
    def is_formula(self) -> bool:
        """Whether γ is asked for by acceptance and c alone, without a machine."""
        formula = ("alphas", "draft_cost", "max_draft_tokens")
        return all(getattr(self, field.name) is None for field in fields(self) if field.name not in formula)

    def draft_alphas(self) -> list[float]:
        """α of each position; one value stands for all of them."""
        given = [ASSUMED_ALPHA] if self.alphas is None else _list("alphas", self.alphas, float)
        longest = _length(self.max_draft_tokens)
        if len(given) == 1:
            return given * (longest or _DEFAULT_LENGTH)
        return given[: longest or MAX_DRAFT_TOKENS]

    def cost(self) -> float:
        """c."""
        if self.draft_cost is None:
            raise InvalidArgumentError.of(
                "draft-cost", "is not given; give it, or a machine by --gpu, --target and --draft"
            )
        return _one("draft-cost", self.draft_cost, float)

    def batches(self) -> list[int]:
        """Rising."""
        text = "1..256" if self.batch is None else self.batch
        if ".." not in text:
            return sorted(set(_sizes("batch", text)))
        low, high = (_size("batch", end) for end in text.split("..", 1))
        if low > high:
            raise InvalidArgumentError.of("batch", f"{text!r} runs backwards")
        doubled = [low]
        while doubled[-1] * 2 < high:
            doubled.append(doubled[-1] * 2)
        return sorted({*doubled, high})

    def contexts(self) -> list[int]:
        """Rising."""
        return sorted(set(_sizes("context", self.context or "2000")))

    def question(self, alphas: list[float]) -> Question:
        """For one draft."""
        lengths = [length for length in _SHOWN_LENGTHS if length <= len(alphas)]
        if self.fixed is not None:
            lengths = _sizes("fixed", self.fixed)
        share = 1.0 if self.idle_share is None else _one("idle-share", self.idle_share, float)
        if not 0 <= share <= 1:
            raise InvalidArgumentError.of("idle-share", f"{share} is outside [0, 1]")
        return Question(survivals(alphas), tuple(lengths), share)

    def options(self) -> list[DraftOption]:
        """Each draft that is asked for, on its machine."""
        if self.drafts is None:
            return [self._option(self.draft or "1B", self.draft_alphas())]
        found = []
        for entry in self.drafts.split(","):
            name, colon, alpha = entry.rpartition(":")
            if not colon:
                raise InvalidArgumentError.of("drafts", f"{entry!r} is not MODEL:ACCEPTANCE")
            length = _length(self.max_draft_tokens) or _DEFAULT_LENGTH
            found.append(self._option(name.strip(), [_one("drafts", alpha, float)] * length))
        return found

    def _option(self, draft: str, alphas: list[float]) -> DraftOption:
        measured = self.calibration is not None or (self.gpu or "").lower() == _THIS
        system: System = self._measured(draft) if measured else self._roofline(draft)
        if self.draft_cost is not None:
            system = FixedDraftCost(system, self.cost())
        return DraftOption(draft, system, self.question(alphas))

    def _measured(self, draft: str) -> MeasuredSystem:
        calibration = self._calibration()
        if calibration.step is None:
            raise InvalidArgumentError.of("calibration", f"{self.calibration} is of a draft service alone")
        drafter = draft if self.draft or self.drafts else next(iter(calibration.drafts), draft)
        if drafter not in calibration.drafts:
            known = ", ".join(calibration.drafts) or "none"
            raise InvalidArgumentError.of("draft", f"{drafter!r} was not measured; measured: {known}")
        return MeasuredSystem(
            f"{calibration.title} with {drafter}", calibration.step, calibration.drafts[drafter]
        )

    def _calibration(self) -> Calibration:
        if self.calibration is not None:
            return Calibration.load(Path(self.calibration))
        from specdecode.calibrations import of_this_machine

        return of_this_machine(self.target)

    def _roofline(self, draft: str) -> RooflineSystem:
        gpu = hardware_profile(self.gpu or "h100")
        target, drafting = model_shape(self.target or "70B"), model_shape(draft, "draft")
        form = Form.SUM if self.form is None else _one("form", self.form, Form)
        group = _fewest(gpu, target, self.dtype or "bf16") if self.tp is None else _size("tp", self.tp)
        kv_dtype = self.kv_dtype or "bf16"
        share = group if self.draft_tp is None else _size("draft-tp", self.draft_tp)
        return RooflineSystem(
            Replica(target, gpu, group, self.dtype or "bf16", kv_dtype),
            Replica(drafting, gpu, share, self.draft_dtype or "bf16", kv_dtype),
            form,
        )


def _fewest(gpu: HardwareProfile, target: ModelShape, dtype: str) -> int:
    """The smallest group of GPUs that keeps some of its memory for KV; the largest there is, if none does."""
    room = gpu.memory_bytes * gpu.memory_share * _WEIGHT_SHARE
    groups = (group for group in _GROUPS if Replica(target, gpu, group, dtype).weight_bytes <= room)
    return next(groups, _GROUPS[-1])


def _length(text: str | None) -> int | None:
    if text is None:
        return None
    length = _one("max-draft-tokens", text, int)
    if not 1 <= length <= MAX_DRAFT_TOKENS:
        raise InvalidArgumentError.of("max-draft-tokens", f"{length} is outside [1, {MAX_DRAFT_TOKENS}]")
    return length


def _one(option: str, text: str, convert: Callable[[str], T]) -> T:
    try:
        return convert(text.strip())
    except ValueError as error:
        raise InvalidArgumentError.of(option, f"{text!r} can't be read: {error}") from None


def _list(option: str, text: str, convert: Callable[[str], T]) -> list[T]:
    return [_one(option, part, convert) for part in text.split(",")]


def _size(option: str, text: str) -> int:
    size = _one(option, text, int)
    if not 1 <= size <= _LARGEST:
        raise InvalidArgumentError.of(option, f"{size} is outside [1, {_LARGEST}]")
    return size


def _sizes(option: str, text: str) -> list[int]:
    return [_size(option, part) for part in text.split(",")]
