"""What steps and drafts cost in seconds: measured tables, the fits through them, and their one file format.

Words: a step is one target forward of n tokens in flight; `rows` of them need logits and sampling; kv counts
the cached tokens that its sequences attend to. The ridge n* = a/b is the number of tokens in flight on
which a step spends as long as on what every step costs (reading the weights).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from specdecode.errors import InvalidArgumentError

CALIBRATION_FORMAT = "specdecode-calibration"
CALIBRATION_VERSION = 1

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepSample:
    """One measured step: a median of repeats."""

    tokens: int
    rows: int
    cached_tokens: int
    seconds: float
    sequences: int = 0
    """Whose tokens they are; 0: not noted."""


@dataclass(frozen=True)
class DraftSample:
    """One measured round of drafting: γ tokens for each of `batch` sequences."""

    num_draft_tokens: int
    batch: int
    cached_tokens: int
    seconds: float


@dataclass(frozen=True)
class StepCosts:
    """T(n, rows, kv): how long a step takes.

    Between two measured points time is linear, after n is rounded up to the size that the engine pads to; a
    stair of the hardware itself is two neighbouring points (8 and 9 tokens, say). So a bucket that is paid
    for costs nothing more up to its edge, and no saving is promised inside it. Beyond the last point the
    fit's slope goes on.

    Attributes:
        base_seconds: a of the fit overhead + a + b·n + c·kv: reading the weights.
        token_seconds: b, for one token in flight that needs logits.
        cached_token_seconds: c, for one cached token attended to.
        overhead_seconds: spent in every step outside the forward; no part of the ridge.
        sequence_seconds: one sequence more in the step, whatever its tokens.
        attention_seconds: one token in flight that attends to one cached token, beside what reading it once
            costs: attention that is bound by arithmetic.
        prefill_share: what a token that needs no logits costs of one that does, in [0, 1].
        tokens: [P] measured tokens in flight, rising; empty: the fit alone.
        seconds: [P] step time at those with every token needing logits and nothing cached, without what the
            sequences cost; never falling.
        buckets: sizes that the engine pads a step to, rising; empty: none.
        residual: median of |fit − measured| / measured; 0 without measurements.
        samples: the measurements, if this was measured here.
    """

    base_seconds: float
    token_seconds: float
    cached_token_seconds: float = 0.0
    overhead_seconds: float = 0.0
    prefill_share: float = 1.0
    tokens: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    buckets: tuple[int, ...] = ()
    residual: float = 0.0
    sequence_seconds: float = 0.0
    attention_seconds: float = 0.0
    samples: tuple[StepSample, ...] = ()

    def __post_init__(self) -> None:
        parts = ("base_seconds", "token_seconds", "cached_token_seconds", "overhead_seconds")
        _check_at_least_zero(self, *parts, "sequence_seconds", "attention_seconds", "residual")
        if self.base_seconds + self.token_seconds <= 0:
            raise InvalidArgumentError.of("base_seconds", "a step must take more than 0 seconds")
        if not 0 <= self.prefill_share <= 1:
            raise InvalidArgumentError.of("prefill_share", f"{self.prefill_share} is outside [0, 1]")
        if len(self.tokens) != len(self.seconds):
            raise InvalidArgumentError.of(
                "seconds", f"{len(self.seconds)} times for {len(self.tokens)} sizes"
            )
        _check_rising("tokens", self.tokens)
        _check_rising("buckets", self.buckets)
        if not all(math.isfinite(second) and second > 0 for second in self.seconds):
            raise InvalidArgumentError.of("seconds", "every step time must be above 0")
        if any(later < earlier for earlier, later in itertools.pairwise(self.seconds)):
            raise InvalidArgumentError.of("seconds", "step time must not fall with tokens in flight")

    @classmethod
    def of_samples(cls, samples: Sequence[StepSample], buckets: tuple[int, ...] = ()) -> StepCosts:
        """Table and fit through measured steps; at least two numbers of tokens in flight are needed."""
        if len({sample.tokens for sample in samples}) < 2:
            raise InvalidArgumentError.of("samples", "steps of at least two numbers of tokens are needed")
        _check_samples([sample.seconds for sample in samples])
        tokens, rows, cached, sequences, seconds = np.array(
            [(s.tokens, s.rows, s.cached_tokens, s.sequences, s.seconds) for s in samples], dtype=np.float64
        ).T
        attended = np.where(sequences > 0, tokens * cached / np.maximum(sequences, 1), 0.0)
        columns = np.stack([np.ones_like(tokens), tokens - rows, rows, cached, sequences, attended], axis=1)
        base, hidden, row, per_cached, sequence, attention = _nonnegative_fit(columns, seconds)
        # A token without logits never costs more than one with them.
        hidden = min(hidden, row)
        fitted = columns @ np.array([base, hidden, row, per_cached, sequence, attention])
        correction = (row - hidden) * (tokens - rows) - per_cached * cached
        correction -= sequence * sequences + attention * attended
        sizes = np.unique(tokens)
        medians = np.array(
            [_least_corrected(seconds[tokens == size], correction[tokens == size]) for size in sizes]
        )
        return cls(
            base_seconds=float(base),
            token_seconds=float(row),
            cached_token_seconds=float(per_cached),
            prefill_share=float(hidden / row) if row else 1.0,
            tokens=tuple(int(size) for size in sizes),
            seconds=tuple(float(value) for value in _never_falling(medians)),
            buckets=buckets,
            residual=float(np.median(np.abs(fitted - seconds) / seconds)),
            sequence_seconds=float(sequence),
            attention_seconds=float(attention),
            samples=tuple(samples),
        )

    def fitted(self, tokens: float, rows: float, cached_tokens: float, sequences: float = 0) -> float:
        """Seconds of a step by the fit alone."""
        counted = rows + self.prefill_share * (tokens - rows)
        fixed = self.overhead_seconds + self.base_seconds
        return fixed + self.token_seconds * counted + float(self._contexts(tokens, cached_tokens, sequences))

    @property
    def ridge(self) -> float:
        """n* = a/b; infinite if tokens in flight are free."""
        return self.base_seconds / self.token_seconds if self.token_seconds else math.inf

    def curve(
        self,
        tokens: npt.ArrayLike,
        rows: npt.ArrayLike | None = None,
        cached_tokens: float = 0,
        sequences: float = 0,
    ) -> Floats:
        """Seconds of a step for each number of tokens in flight.

        Args:
            tokens: [...] tokens in flight.
            rows: [...] of those, how many need logits; all of them unless given.
            cached_tokens: kv, the same for all.
            sequences: the same for all; what they and their attention cost is counted only if given. Tokens
                and contexts count as dealt out evenly.
        """
        counts = np.asarray(tokens, dtype=np.float64)
        seconds = self._with_logits(counts)
        if rows is not None and self.prefill_share < 1:
            alone = self._with_logits(np.asarray(rows, dtype=np.float64))
            seconds = alone + self.prefill_share * (seconds - alone)
        return np.asarray(seconds + self._contexts(counts, cached_tokens, sequences))

    def step(
        self, tokens: int, rows: int | None = None, cached_tokens: float = 0, sequences: float = 0
    ) -> float:
        """Seconds of one step; see `curve`."""
        return float(self.curve(tokens, rows, cached_tokens, sequences))

    def _contexts(self, tokens: npt.ArrayLike, cached_tokens: float, sequences: float) -> Floats:
        """What sequences and what is cached of them add."""
        each = cached_tokens / sequences if sequences else 0.0
        constant = self.cached_token_seconds * cached_tokens + self.sequence_seconds * sequences
        return np.asarray(constant + self.attention_seconds * each * np.asarray(tokens, dtype=np.float64))

    def _with_logits(self, counts: Floats) -> Floats:
        padded = self._padded(counts)
        if not self.tokens:
            return self.overhead_seconds + self.base_seconds + self.token_seconds * padded
        beyond = np.maximum(padded - self.tokens[-1], 0) * self.token_seconds
        return np.asarray(np.interp(padded, self.tokens, self.seconds) + beyond)

    def _padded(self, counts: Floats) -> Floats:
        if not self.buckets:
            return counts
        sizes = np.append(np.asarray(self.buckets, dtype=np.float64), np.inf)
        padded = sizes[np.searchsorted(sizes, counts)]
        return np.where(np.isinf(padded), counts, padded)


@dataclass(frozen=True)
class DraftCosts:
    """How long a drafter takes for one round of a batch that drafts γ_i tokens for sequence i:

    base + pass·max γ_i + Σ_i (sequence + token·γ_i + cached_token·kv_i·γ_i). The part in front depends on the
    deepest draft alone and the rest is a sum over sequences: that keeps the joint choice exact
    (`specdecode.cost.choose`). A drafter with one pass a round pays `pass` and `cached_token` once.

    Attributes:
        base_seconds: a round of any depth.
        pass_seconds: one pass through the drafter, whatever the batch.
        sequence_seconds: one sequence more in the batch.
        token_seconds: one drafted token more.
        cached_token_seconds: one cached token attended to, in each pass.
        single_pass: all tokens of a round come from one pass (look-ups, parallel heads).
        samples: the measurements, if this was measured.
        residual: median of |fit − measured| / measured.
    """

    base_seconds: float = 0.0
    pass_seconds: float = 0.0
    sequence_seconds: float = 0.0
    token_seconds: float = 0.0
    cached_token_seconds: float = 0.0
    single_pass: bool = False
    samples: tuple[DraftSample, ...] = ()
    residual: float = 0.0

    def __post_init__(self) -> None:
        parts = ("base_seconds", "pass_seconds", "sequence_seconds", "token_seconds")
        _check_at_least_zero(self, *parts, "cached_token_seconds", "residual")
        if sum(getattr(self, part) for part in parts) <= 0:
            raise InvalidArgumentError.of("pass_seconds", "drafting must take more than 0 seconds")

    @classmethod
    def of_samples(cls, samples: Sequence[DraftSample], single_pass: bool = False) -> DraftCosts:
        """The fit through measured rounds of equal γ; two different ones at least."""
        if len({(sample.num_draft_tokens, sample.batch) for sample in samples}) < 2:
            raise InvalidArgumentError.of("samples", "rounds of at least two sizes are needed")
        _check_samples([sample.seconds for sample in samples])
        drafts, batch, cached, seconds = np.array(
            [(s.num_draft_tokens, s.batch, s.cached_tokens, s.seconds) for s in samples], dtype=np.float64
        ).T
        passes = np.ones_like(drafts) if single_pass else drafts
        # With one pass a round, base and pass are the same column.
        pass_column = np.zeros_like(drafts) if single_pass else passes
        columns = np.stack(
            [np.ones_like(drafts), pass_column, batch, drafts * batch, passes * cached], axis=1
        )
        parts = _nonnegative_fit(columns, seconds)
        residual = float(np.median(np.abs(columns @ parts - seconds) / seconds))
        base, per_pass, sequence, token, cached_token = parts.tolist()
        return cls(base, per_pass, sequence, token, cached_token, single_pass, tuple(samples), residual)

    def depth_seconds(self, depths: npt.ArrayLike) -> Floats:
        """What a round pays once for its deepest draft, for each depth; 0 at depth 0."""
        deepest = np.asarray(depths, dtype=np.float64)
        passes = np.minimum(deepest, 1) if self.single_pass else deepest
        return np.where(deepest > 0, self.base_seconds + self.pass_seconds * passes, 0.0)

    def sequence_parts(self, max_depth: int, cached_tokens: Floats) -> Floats:
        """[N, max_depth + 1] what each sequence adds by its own γ = 0..max_depth; cached_tokens [N]."""
        depths = np.arange(max_depth + 1, dtype=np.float64)
        passes = np.minimum(depths, 1) if self.single_pass else depths
        once = self.sequence_seconds * np.minimum(depths, 1) + self.token_seconds * depths
        return np.asarray(once + self.cached_token_seconds * cached_tokens[:, None] * passes)

    def round(self, num_draft_tokens: Sequence[int], cached_tokens: Sequence[float] | None = None) -> float:
        """Seconds of one round; γ_i and cached tokens of each sequence, in order."""
        drafted = np.asarray(num_draft_tokens, dtype=np.int64)
        if not drafted.size or not drafted.max():
            return 0.0
        cached = (
            np.zeros(len(drafted)) if cached_tokens is None else np.asarray(cached_tokens, dtype=np.float64)
        )
        parts = self.sequence_parts(int(drafted.max()), cached)[np.arange(len(drafted)), drafted]
        return float(self.depth_seconds(drafted.max()) + parts.sum())


@dataclass(frozen=True)
class Calibration:
    """Everything measured about one replica and its drafters.

    Attributes:
        key: what it was measured on (model, dtype, device, parallelism, library versions): another key is
            another machine.
        step: of the target; None where only drafters were measured.
        drafts: by drafter.
    """

    key: Mapping[str, str]
    step: StepCosts | None = None
    drafts: Mapping[str, DraftCosts] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What was measured, for people: the same model has other costs in another dtype."""
        model, dtype, device = (self.key.get(name, "") for name in ("model", "dtype", "device"))
        named = f"{model} ({dtype})" if model and dtype else model
        return " on ".join(part for part in (named, device) if part) or "calibrated"

    def to_json(self) -> dict[str, Any]:
        """The versioned document; `from_json` reads it."""
        return {
            "format": CALIBRATION_FORMAT,
            "version": CALIBRATION_VERSION,
            "key": dict(self.key),
            "step": None if self.step is None else asdict(self.step),
            "drafts": {name: asdict(costs) for name, costs in self.drafts.items()},
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Raises InvalidArgumentError that names the field, but for a whole document of this version."""
        if not isinstance(document, dict) or document.get("format") != CALIBRATION_FORMAT:
            raise InvalidArgumentError.of("format", f"not a calibration: {CALIBRATION_FORMAT!r} is expected")
        if document.get("version") != CALIBRATION_VERSION:
            version = document.get("version")
            raise InvalidArgumentError.of(
                "version", f"{version!r} is not {CALIBRATION_VERSION}; measure again"
            )
        key, drafts = document.get("key"), document.get("drafts", {})
        if not isinstance(key, dict) or not isinstance(drafts, dict):
            raise InvalidArgumentError.of("key", "key and drafts must be objects")
        costs = {str(name): _draft_costs(part, f"drafts.{name}") for name, part in drafts.items()}
        texts = {str(name): str(value) for name, value in key.items()}
        step = document.get("step")
        if step is None and texts.get("role") != "draft":
            raise InvalidArgumentError.of("step", "is missing, and this is no draft service's calibration")
        return cls(texts, None if step is None else _step_costs(step), costs)

    def save(self, path: Path) -> None:
        """Write the document, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises InvalidArgumentError that names file and field if there is no whole calibration in it."""
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise InvalidArgumentError.of("calibration", f"{path} can't be read: {error}") from error
        except InvalidArgumentError as error:
            raise InvalidArgumentError.of("calibration", f"{path}: {error.message}") from error


Costs = TypeVar("Costs", StepCosts, DraftCosts, StepSample, DraftSample)


def _step_costs(part: object) -> StepCosts:
    parts, samples = _with_samples(part, "step")
    read = tuple(_read(StepSample, sample, "step.samples") for sample in samples)
    return _read(StepCosts, {**parts, "samples": read}, "step")


def _draft_costs(part: object, name: str) -> DraftCosts:
    parts, samples = _with_samples(part, name)
    read = tuple(_read(DraftSample, sample, f"{name}.samples") for sample in samples)
    return _read(DraftCosts, {**parts, "samples": read}, name)


def _with_samples(part: object, name: str) -> tuple[dict[str, Any], Sequence[object]]:
    if not isinstance(part, dict) or not isinstance(part.get("samples", []), list | tuple):
        raise InvalidArgumentError.of(name, "must be an object whose samples are a list")
    return part, part.get("samples", [])


def _read(kind: type[Costs], part: object, name: str) -> Costs:
    """A dataclass of numbers out of a JSON object; every value is checked."""
    if not isinstance(part, dict):
        raise InvalidArgumentError.of(name, "must be an object")
    unknown = part.keys() - {entry.name for entry in fields(kind)}
    if unknown:
        raise InvalidArgumentError.of(f"{name}.{min(unknown)}", "is not known")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in part.items()
    }
    for key, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(number, int | float | StepSample | DraftSample) for number in numbers):
            raise InvalidArgumentError.of(f"{name}.{key}", "must be a number, or a list of numbers")
    try:
        return kind(**values)
    except TypeError as error:
        raise InvalidArgumentError.of(name, f"is not whole: {error}") from error
    except InvalidArgumentError as error:
        raise InvalidArgumentError.of(name, error.message) from error


def _nonnegative_fit(columns: Floats, seconds: Floats) -> Floats:
    """Least squares of relative errors with coefficients >= 0; columns [M, C], seconds [M] -> [C].

    Exact for the few columns there are: the best of the plain fits on all subsets of columns.
    """
    weighted = columns / seconds[:, None]
    best, best_error = np.zeros(columns.shape[1]), math.inf
    for size in range(1, columns.shape[1] + 1):
        for subset in itertools.combinations(range(columns.shape[1]), size):
            found, *_ = np.linalg.lstsq(weighted[:, subset], np.ones(len(seconds)), rcond=None)
            error = float(np.square(weighted[:, subset] @ found - 1).sum())
            # A larger subset must earn its column.
            if found.min() >= 0 and error < best_error - 1e-9:
                best, best_error = np.zeros(columns.shape[1]), error
                best[list(subset)] = found
    return best


def _least_corrected(seconds: Floats, correction: Floats) -> float:
    """Of one size: seconds as they would be with all logits and nothing cached, by the measurements that need
    the least correction for that, since it is the fit's.
    """
    shares = np.abs(correction) / seconds
    near = shares <= max(2 * shares.min(), 0.05)
    return float(np.median((seconds + correction)[near]))


def _never_falling(values: Floats) -> Floats:
    """The nearest sequence that never falls (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, left), (high, right) = blocks[-2:]
            blocks[-2:] = [((low * left + high * right) / (left + right), left + right)]
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def _check_at_least_zero(costs: StepCosts | DraftCosts, *names: str) -> None:
    for name in names:
        value = getattr(costs, name)
        if not math.isfinite(value) or value < 0:
            raise InvalidArgumentError.of(name, f"{value} is not a finite number of at least 0")


def _check_samples(seconds: Sequence[float]) -> None:
    if not all(math.isfinite(value) and value > 0 for value in seconds):
        raise InvalidArgumentError.of("samples", "every measured time must be above 0")


def _check_rising(name: str, sizes: tuple[int, ...]) -> None:
    if any(size < 1 for size in sizes) or any(b <= a for a, b in itertools.pairwise(sizes)):
        raise InvalidArgumentError.of(name, "sizes must be whole numbers from 1 on, rising")
