"""How likely drafts are to survive: learnt from all requests by what they have in common; kept on disk.

α_i is the probability that position i is drafted and accepted, given that all before it were; a position that
a drafter was asked for and had nothing to say at counts as not accepted, so drafters that often answer with
less than they were asked for are compared with those that never do. s_i = α_0·…·α_i.

Requests that are alike share a class: drafter, verification method, temperature, how far the output is,
traffic class. A class leans on the one without its traffic class, that on the one without output offset, and
so on to the drafter alone, each by `_PRIOR_TESTS` tests: a class that was seen little says what its parent
says. Counts are the exact expectations that verification reports (`StepResult.tested`, `passed`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specdecode.cost_tables import Floats
from specdecode.types import MAX_DRAFT_TOKENS, DrafterKind, Method, SamplingParams

logger = logging.getLogger(__name__)

_FORMAT = "specdecode-estimates"
_VERSION = 1
_SAVE_SECONDS = 60.0

_PRIOR_TESTS = 4.0
# Counts halve when position 0 was tested this often: what was learnt long ago fades.
_MAX_TESTS = 2000.0
# Labels come from clients; what was used the longest time ago is forgotten.
_MAX_CLASSES = 4096
# α of a drafter that nothing is known of. It decides what is tried first, no more.
_FIRST_ALPHA = {DrafterKind.MODEL: 0.5, DrafterKind.NGRAM: 0.3, DrafterKind.SUFFIX: 0.3}

_TEMPERATURES = (1e-9, 0.5, 0.9, 1.2)
_OFFSETS = (16, 64, 256)


@dataclass(frozen=True)
class ClassKey:
    """What requests have in common; None: all of them.

    Attributes:
        model: of the drafter, where it has one.
        temperature: bucket.
        offset: bucket of tokens emitted.
    """

    drafter: DrafterKind
    model: str = ""
    method: Method | None = None
    temperature: int | None = None
    offset: int | None = None
    traffic_class: str | None = None

    @property
    def parent(self) -> ClassKey | None:
        """The same without the finest part."""
        if self.traffic_class is not None:
            return replace(self, traffic_class=None)
        if self.offset is not None:
            return replace(self, offset=None)
        if self.temperature is not None:
            return replace(self, temperature=None)
        return None if self.method is None else replace(self, method=None)


def class_key(
    drafter: DrafterKind,
    model: str,
    method: Method,
    sampling: SamplingParams,
    traffic_class: str,
    num_output: int,
) -> ClassKey:
    """The finest class of a round."""
    return ClassKey(
        drafter,
        model,
        method,
        temperature_bucket(sampling.temperature),
        offset_bucket(num_output),
        traffic_class or None,
    )


def temperature_bucket(temperature: float) -> int:
    """0 is greedy."""
    return bisect_right(_TEMPERATURES, temperature)


def offset_bucket(num_output: int) -> int:
    """How far the output is."""
    return bisect_right(_OFFSETS, num_output)


def ignores_transforms(drafter: DrafterKind, sampling: SamplingParams) -> bool:
    """Whether the target bends the distribution in a way that this drafter knows nothing of: what such
    requests accept says nothing of others. The model drafter applies everything.
    """
    return drafter.looks_up and bool(
        sampling.has_penalties
        or sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.banned_token_ids
    )


class RequestClass:
    """Counts of one class, by draft position."""

    def __init__(self, key: ClassKey, parent: RequestClass | None) -> None:
        self.key = key
        self.parent = parent
        self.tested: list[float] = []
        self.passed: list[float] = []
        self._version = 0
        self._hazards: list[float] = []
        self._hazards_of: tuple[int, ...] = ()

    @property
    def chain(self) -> Iterator[RequestClass]:
        """This class and all that it leans on, the finest first."""
        found: RequestClass | None = self
        while found is not None:
            yield found
            found = found.parent

    def observe(self, tested: Sequence[float], passed: Sequence[float]) -> None:
        """Counts one round, here and in all classes that this one leans on."""
        for entry in self.chain:
            entry._count(tested, passed)

    def _count(self, tested: Sequence[float], passed: Sequence[float]) -> None:
        own_tested, own_passed = self.tested, self.passed
        missing = len(tested) - len(own_tested)
        if missing > 0:
            own_tested.extend([0.0] * missing)
            own_passed.extend([0.0] * missing)
        for position, (reached, kept) in enumerate(zip(tested, passed, strict=True)):
            own_tested[position] += reached
            own_passed[position] += kept
        if own_tested and own_tested[0] > _MAX_TESTS:
            self.tested = [count / 2 for count in own_tested]
            self.passed = [count / 2 for count in own_passed]
        self._version += 1

    @property
    def hazards(self) -> list[float]:
        """1 − α_i for each position, MAX_DRAFT_TOKENS of them; not to be changed."""
        versions = tuple(entry._version for entry in self.chain)
        if versions != self._hazards_of or not self._hazards:
            self._hazards_of, self._hazards = versions, self._new_hazards()
        return self._hazards

    def _new_hazards(self) -> list[float]:
        prior = _FIRST_ALPHA[self.key.drafter]
        base = None if self.parent is None else self.parent.hazards
        hazards = []
        for position, (tested, passed) in enumerate(zip(self.tested, self.passed, strict=True)):
            if base is not None:
                prior = 1 - base[position]
            # Without a parent, a position leans on the one before it.
            prior = (passed + _PRIOR_TESTS * prior) / (tested + _PRIOR_TESTS)
            hazards.append(1 - prior)
        num_missing = MAX_DRAFT_TOKENS - len(hazards)
        return hazards + ([1 - prior] * num_missing if base is None else base[len(hazards) :])


class Estimates:
    """All classes, of all replicas' requests."""

    def __init__(self) -> None:
        self._classes: OrderedDict[ClassKey, RequestClass] = OrderedDict()
        self._noted: dict[RequestClass, tuple[list[float], list[float]]] = {}

    def __len__(self) -> int:
        return len(self._classes)

    def of(self, key: ClassKey) -> RequestClass:
        """The class of a key, made where it is new."""
        found = self._classes.get(key)
        if found is None:
            parent = None if key.parent is None else self.of(key.parent)
            found = self._classes[key] = RequestClass(key, parent)
            if len(self._classes) > _MAX_CLASSES:
                self._classes.popitem(last=False)
        self._classes.move_to_end(key)
        return found

    def note(self, own: RequestClass, tested: Sequence[float], passed: Sequence[float]) -> None:
        """Takes down one round of a class; counted by `settle`."""
        noted = self._noted.setdefault(own, ([0.0] * MAX_DRAFT_TOKENS, [0.0] * MAX_DRAFT_TOKENS))
        for position, (reached, kept) in enumerate(zip(tested, passed, strict=True)):
            noted[0][position] += reached
            noted[1][position] += kept

    def settle(self) -> None:
        """Counts what was noted: once a step, since every class that another leans on changes with it."""
        noted, self._noted = self._noted, {}
        for own, (tested, passed) in noted.items():
            length = next(i for i in range(MAX_DRAFT_TOKENS, -1, -1) if i == 0 or tested[i - 1])
            own.observe(tested[:length], passed[:length])

    def to_json(self) -> dict[str, Any]:
        """The versioned document; `from_json` reads it."""
        classes = [
            {
                "drafter": key.drafter.value,
                "model": key.model,
                "method": None if key.method is None else key.method.value,
                "temperature": key.temperature,
                "offset": key.offset,
                "traffic_class": key.traffic_class,
                "tested": [round(count, 4) for count in entry.tested],
                "passed": [round(count, 4) for count in entry.passed],
            }
            for key, entry in self._classes.items()
            if entry.tested
        ]
        return {"format": _FORMAT, "version": _VERSION, "classes": classes}

    @classmethod
    def from_json(cls, document: Any) -> Estimates:
        """Raises ValueError, TypeError or KeyError but for a whole document of this version."""
        if (document["format"], document["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"not {_FORMAT} of version {_VERSION}")
        found = cls()
        for entry in document["classes"]:
            own = found.of(_key_of(entry))
            own.tested, own.passed = _counts(entry["tested"]), _counts(entry["passed"])
            if len(own.tested) != len(own.passed) or len(own.tested) > MAX_DRAFT_TOKENS:
                raise ValueError(f"{len(own.tested)} tested and {len(own.passed)} passed positions")
            # What was rounded may be off by the last digit.
            own.passed = [min(pair) for pair in zip(own.tested, own.passed, strict=True)]
        return found


def _key_of(entry: Any) -> ClassKey:
    method, label = entry["method"], entry["traffic_class"]
    if not isinstance(entry["model"], str) or not isinstance(label, str | None):
        raise TypeError("model and traffic_class must be texts")
    return ClassKey(
        DrafterKind(entry["drafter"]),
        entry["model"],
        None if method is None else Method(method),
        _bucket(entry["temperature"]),
        _bucket(entry["offset"]),
        label,
    )


def _bucket(value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or value < 0):
        raise ValueError(f"{value!r} is no bucket")
    return value


def _counts(values: Any) -> list[float]:
    counts = [float(value) for value in values]
    # Written so that NaN fails too.
    if not all(0 <= count < float("inf") for count in counts):
        raise ValueError("a count is not at least 0")
    return counts


class EstimatesFile:
    """Estimates that survive a restart: read at the start, written once a minute and at the end.

    Args:
        path: of the file; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.estimates = Estimates() if path is None else load(path)

    async def run(self) -> None:
        """Writes once a minute, until cancelled."""
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            self.save()

    def save(self) -> None:
        """Writes the file, whole or not at all; one that can't be written is logged."""
        if self._path is None:
            return
        try:
            save(self.estimates, self._path)
        except OSError as error:
            logger.warning("estimates can't be written to %s: %s", self._path, error)


def load(path: Path) -> Estimates:
    """What was saved; nothing, with a warning, if it can't be used."""
    try:
        return Estimates.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Estimates()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("estimates in %s can't be used, starting anew: %r", path, error)
        return Estimates()


def save(estimates: Estimates, path: Path) -> None:
    """Writes the file, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(estimates.to_json()) + "\n", encoding="utf-8")
    partial.replace(path)


def survivals(classes: Sequence[RequestClass], frailties: Sequence[float], depth: int) -> Floats:
    """[N, depth] s_i of N requests: their class's, with its hazards scaled by what the request did itself.

    Args:
        classes: [N]
        frailties: [N] the request's failures over those that its class would have had.
        depth: positions.
    """
    hazards = np.array([entry.hazards[:depth] for entry in classes]).reshape(len(classes), depth)
    scaled = np.minimum(hazards * np.array(frailties)[:, None], 1.0)
    return np.asarray(np.cumprod(1.0 - scaled, axis=1))
