"""What is asked of a simulated fleet: requests at times, from a rate or a file; and their text's odds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdecode.errors import InvalidArgumentError
from specdecode.types import DrafterKind

KINDS = ("chat", "copy")
_LARGEST = 1_000_000
_REQUIRED = ("at", "prompt_tokens", "max_tokens")
_KNOWN = (*_REQUIRED, "kind", "alpha")

_COPIED_ALPHA = 0.95
_OTHER_ALPHA = 0.15
_SILENT_SHARE = 0.5
"""Of positions that are not copied: where a look-up has nothing to say."""
_COPIED_TOKENS = {"copy": 24.0, "chat": 6.0}
_OTHER_TOKENS = {"copy": 8.0, "chat": 60.0}
"""Mean lengths of what is copied and of what is not."""
_CONCENTRATION = 20.0
"""Of the Beta distribution of requests' own α around the mean."""


@dataclass(frozen=True)
class SimulatedRequest:
    """One request of the workload.

    Attributes:
        index: in order of arrival; with the seed it determines the text's odds.
        at: seconds since the start.
        kind: `copy` or `chat`: how much of the output a look-up finds.
        alpha: of the draft model at every position.
    """

    index: int
    at: float
    prompt_tokens: int
    max_tokens: int
    kind: str
    alpha: float


@dataclass(frozen=True)
class TextOdds:
    """What drafters would get right of one request's output, the same whoever drafts when: ways to decode are
    compared on the same texts.

    Attributes:
        runs: by drafter, [max_tokens] how many drafts in a row are accepted from each output position on.
        silent: [max_tokens] whether a look-up has nothing to say there.
    """

    runs: Mapping[DrafterKind, list[int]]
    silent: list[bool]

    @classmethod
    def of(cls, request: SimulatedRequest, seed: int) -> TextOdds:
        """Drawn by the seed and the request's index alone."""
        random = np.random.default_rng((seed, request.index))
        length = request.max_tokens
        copied = _copied(request, random)
        chances = np.where(copied, _COPIED_ALPHA, _OTHER_ALPHA)
        found = random.random(length) < chances
        modelled = random.random(length) < request.alpha
        silent = ~copied & (random.random(length) < _SILENT_SHARE)
        runs = {DrafterKind.NGRAM: _runs(found.tolist()), DrafterKind.MODEL: _runs(modelled.tolist())}
        return cls(runs, silent.tolist())


def _copied(request: SimulatedRequest, random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[max_tokens] whether each output token is copied from the context."""
    means = {True: _COPIED_TOKENS[request.kind], False: _OTHER_TOKENS[request.kind]}
    state = bool(random.random() < means[True] / (means[True] + means[False]))
    copied = np.zeros(request.max_tokens, dtype=np.bool_)
    at = 0
    while at < request.max_tokens:
        length = int(random.geometric(1 / means[state]))
        copied[at : at + length] = state
        at, state = at + length, not state
    return copied


def _runs(hits: list[bool]) -> list[int]:
    """How many hits in a row begin at each position."""
    runs, length = [0] * len(hits), 0
    for position in range(len(hits) - 1, -1, -1):
        length = length + 1 if hits[position] else 0
        runs[position] = length
    return runs


@dataclass(frozen=True)
class Arrivals:
    """A workload by its rate.

    Attributes:
        rate: requests a second; their distances are exponential.
        num_requests: in all.
        prompt_tokens: mean; each is drawn evenly from half of it to one and a half times.
        max_tokens: mean, as `prompt_tokens`.
        copy_share: of requests that are of kind `copy`.
        alpha: mean of the draft model's; each request has its own around it.
    """

    rate: float
    num_requests: int = 200
    prompt_tokens: int = 500
    max_tokens: int = 200
    copy_share: float = 0.5
    alpha: float = 0.7

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InvalidArgumentError.of("rate", f"{self.rate} is not a finite number above 0")
        for name in ("num_requests", "prompt_tokens", "max_tokens"):
            _check_count(name, getattr(self, name))
        for name in ("copy_share", "alpha"):
            _check_share(name, getattr(self, name))

    def requests(self, seed: int) -> list[SimulatedRequest]:
        """Drawn by the seed."""
        random = np.random.default_rng((seed, 2**32))
        count = self.num_requests
        at = np.cumsum(random.exponential(1 / self.rate, count))
        prompts, outputs = (_around(random, mean, count) for mean in (self.prompt_tokens, self.max_tokens))
        is_copy = random.random(count) < self.copy_share
        alphas = _alphas(random, self.alpha, count)
        return [
            SimulatedRequest(
                index,
                float(at[index]),
                prompts[index],
                outputs[index],
                KINDS[int(is_copy[index])],
                alphas[index],
            )
            for index in range(count)
        ]


def _around(random: np.random.Generator, mean: int, count: int) -> list[int]:
    low, high = max(mean // 2, 1), max(mean + mean // 2, 1)
    return [int(value) for value in random.integers(low, high, count, endpoint=True)]


def _alphas(random: np.random.Generator, mean: float, count: int) -> list[float]:
    if mean in (0.0, 1.0):
        return [mean] * count
    return [float(a) for a in random.beta(_CONCENTRATION * mean, _CONCENTRATION * (1 - mean), count)]


def read_trace(path: Path, alpha: float = 0.7) -> list[SimulatedRequest]:
    """One request a line, as JSON: {"at", "prompt_tokens", "max_tokens", "kind" (chat), "alpha"}.

    Args:
        path: of the file; empty lines are skipped.
        alpha: of requests that name none.

    Raises:
        InvalidArgumentError: the file, line and field that can't be used, and why.
    """
    _check_share("alpha", alpha)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError.of("trace", f"{path} can't be read: {error}") from error
    requests: list[SimulatedRequest] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = _request(line, len(requests), alpha)
            if requests and found.at < requests[-1].at:
                raise InvalidArgumentError.of(
                    "at", f"{found.at:g} is before the line above, {requests[-1].at:g}: time goes backwards"
                )
        except InvalidArgumentError as error:
            raise InvalidArgumentError.of("trace", f"{path} line {number}: {error.message}") from None
        requests.append(found)
    if not requests:
        raise InvalidArgumentError.of("trace", f"{path} holds no request")
    return requests


def _request(line: str, index: int, alpha: float) -> SimulatedRequest:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError.of("line", f"is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgumentError.of("line", "is not a JSON object")
    for name in document:
        if name not in _KNOWN:
            raise InvalidArgumentError.of(name, f"is none of {', '.join(_KNOWN)}")
    for name in _REQUIRED:
        if name not in document:
            raise InvalidArgumentError.of(name, "is missing")
    at = _number("at", document["at"])
    if at < 0:
        raise InvalidArgumentError.of("at", f"{at:g} is below 0")
    for name in ("prompt_tokens", "max_tokens"):
        _check_count(name, document[name])
    kind = document.get("kind", "chat")
    if kind not in KINDS:
        raise InvalidArgumentError.of("kind", f"{kind!r} is none of {', '.join(KINDS)}")
    own = _number("alpha", document.get("alpha", alpha))
    _check_share("alpha", own)
    return SimulatedRequest(index, at, document["prompt_tokens"], document["max_tokens"], kind, own)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidArgumentError.of(name, f"{value!r} is not a finite number")
    return float(value)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise InvalidArgumentError.of(name, f"{value!r} is not a whole number of 1 to {_LARGEST}")


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidArgumentError.of(name, f"{value} is outside [0, 1]")
