"""What a drafter did for one sequence: its acceptance, how far it drafted last, when it is probed next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.estimates import Estimates, RequestClass, class_key, ignores_transforms, offset_bucket
from router.validation import ResolvedRequest
from specdecode.types import DrafterKind, StepResult

ACCEPTANCE_WINDOW = 100
"""Tested positions that the acceptance is taken over."""
_MIN_TESTED = 20
"""Fewer say nothing."""


@dataclass(frozen=True)
class Temper:
    """How fast a drafter's sequences are believed to be unlike their class.

    Attributes:
        prior_failures: failures that the class's word is worth.
        memory: weight of all before, in each new round.
        first_probe_tokens: emitted tokens between a shutdown and the first probe.
        longest_probe_tokens: between two probes at most.
    """

    prior_failures: float
    memory: float
    first_probe_tokens: int
    longest_probe_tokens: int


TEMPERS = {
    # A sequence copies or it does not, and that changes within a text: the last rounds say nearly all.
    # (On simulated requests that switch every 4 to 33 rounds this predicts within 3 % of the best setting for
    # each; of requests of a steady α of their own, the model's within 0.2 %.)
    DrafterKind.NGRAM: Temper(0.5, 0.6, 4, 32),
    DrafterKind.SUFFIX: Temper(0.5, 0.6, 4, 32),
    DrafterKind.MODEL: Temper(3.0, 0.95, 16, 512),
}


class DrafterHistory:
    """One drafter's rounds for one sequence.

    A sequence fails more or less often than its class by one factor at all positions, its frailty:
    (failures + k) / (failures that the class would have had + k).

    Args:
        drafter: who.
        model: of the drafter, where it has one.
        request: what was asked for.
        estimates: of all requests.

    Attributes:
        last_length: γ of the last decision, 0 where that was not for this drafter.
    """

    def __init__(
        self, drafter: DrafterKind, model: str, request: ResolvedRequest, estimates: Estimates
    ) -> None:
        self.last_length = 0
        self._estimates = estimates
        sampling = request.sampling
        self._key = class_key(drafter, model, request.method, sampling, request.traffic_class, 0)
        self._class = estimates.of(self._key)
        self._is_alone = ignores_transforms(drafter, sampling)
        self._temper = TEMPERS[drafter]
        self._failures = 0.0
        self._expected = 0.0
        self._rounds: deque[tuple[int, int]] = deque()
        self._num_accepted = 0
        self._num_tested = 0
        self._probe_tokens = self._temper.first_probe_tokens
        self._probe_at = self._temper.first_probe_tokens

    @property
    def frailty(self) -> float:
        """Failures over those of the class; 1 at first."""
        prior = self._temper.prior_failures
        return (self._failures + prior) / (self._expected + prior)

    @property
    def acceptance(self) -> float | None:
        """accepted / (accepted + rejected) of the last tested positions; None while too few were."""
        return self._num_accepted / self._num_tested if self._num_tested >= _MIN_TESTED else None

    def own_class(self, num_output: int) -> RequestClass:
        """The class that it belongs to at this point of its output."""
        bucket = offset_bucket(num_output)
        if bucket != self._key.offset:
            self._key = replace(self._key, offset=bucket)
            self._class = self._estimates.of(self._key)
        return self._class

    def said_nothing(self) -> None:
        """The drafter had nothing to propose."""
        self._observe([1.0], [0.0])

    def verified(self, result: StepResult, num_asked: int) -> None:
        """Takes what the verification says of each position; what was asked for beyond was not drafted."""
        tested, passed = list(result.tested), list(result.passed)
        is_short = len(tested) < num_asked and result.finish_reason is None
        # A model's draft is short only where its limits or a stop id make it so.
        if tested and is_short and self._key.drafter.looks_up:
            tested.append(passed[-1])
            passed.append(0.0)
        self._observe(tested, passed)
        self._count(result.num_accepted, result.num_drafted)

    def foreseen(self, num_matched: int, num_foreseen: int, num_output: int) -> None:
        """What was looked up beside a lease was compared with what the target emitted."""
        num_tested = num_matched + (num_matched < num_foreseen)
        passed = [1.0] * num_matched + [0.0] * (num_tested - num_matched)
        self._observe([1.0] * num_tested, passed)
        self._count(num_matched, num_foreseen)
        self.probed(num_matched == num_foreseen, num_output)

    def _observe(self, tested: Sequence[float], passed: Sequence[float]) -> None:
        hazards, memory = self._class.hazards, self._temper.memory
        expected = sum(reached * hazard for reached, hazard in zip(tested, hazards, strict=False))
        self._failures = memory * self._failures + sum(tested) - sum(passed)
        self._expected = memory * self._expected + expected
        if not self._is_alone:
            self._estimates.note(self._class, tested, passed)

    def _count(self, num_accepted: int, num_drafted: int) -> None:
        num_tested = num_accepted + (num_accepted < num_drafted)
        self._rounds.append((num_accepted, num_tested))
        self._num_accepted += num_accepted
        self._num_tested += num_tested
        while self._rounds and self._num_tested - self._rounds[0][1] >= ACCEPTANCE_WINDOW:
            accepted, tested = self._rounds.popleft()
            self._num_accepted -= accepted
            self._num_tested -= tested

    # Probes

    def is_probe_due(self, num_output: int) -> bool:
        """Whether so many tokens were emitted since it last drafted that it may be tried again."""
        return num_output >= self._probe_at

    def drafted(self, num_output: int) -> None:
        """It drafts: the next probe is so much later."""
        self._probe_at = num_output + self._probe_tokens

    def probed(self, paid: bool, num_output: int) -> None:
        """What came of a probe: all accepted, and the next comes soon and what was before is forgotten;
        else the next comes after twice as many tokens.
        """
        if paid:
            self._probe_tokens = self._temper.first_probe_tokens
            self._rounds.clear()
            self._num_accepted = self._num_tested = 0
            self._probe_at = num_output
        else:
            self._probe_tokens = min(2 * self._probe_tokens, self._temper.longest_probe_tokens)
            self._probe_at = num_output + self._probe_tokens
