"""What is measured about speculation: sums over rounds, and what follows from them. Pure arithmetic.

Everything is kept as a sum, so that figures of many requests add up; shares, means and speedups are
properties. The histogram of accepted runs, `runs[γ][a]`, holds most counts: rounds, drafted and accepted
tokens, in all and by draft position, are its margins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdecode.cost import survivals
from specdecode.types import DrafterKind, Method


@dataclass(frozen=True)
class FigureLabel:
    """What rounds that are counted together have in common.

    Attributes:
        temperature: bucket of the request's temperature.
        traffic_class: the request's label, "" without one.
        drafter: who was asked for drafts, whether or not any came; None: nobody.
        method: of verification.
    """

    temperature: str
    traffic_class: str
    drafter: DrafterKind | None
    method: Method


@dataclass(frozen=True)
class Predictions:
    """What decisions expected of rounds, and what came of the same rounds; sums."""

    num_rounds: int = 0
    predicted_emitted: float = 0.0
    predicted_seconds: float = 0.0
    emitted: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Regret:
    """How the γ that were decided compare to always the same one, by what was estimated before each round.

    Attributes:
        num_rounds: rounds that were compared: a sample of those whose γ the router chose.
        expected: emitted tokens expected at the γ decided; the sum.
        lost: by fixed γ = 0, 1, …: tokens that it would have been expected to emit more in the same time; the
            sum, negative where the decision was better.
    """

    num_rounds: int = 0
    expected: float = 0.0
    lost: tuple[float, ...] = ()

    @property
    def shares(self) -> tuple[float, ...]:
        """By fixed γ: `lost` as a share of what was expected."""
        return tuple(lost / self.expected for lost in self.lost) if self.expected else ()


@dataclass(frozen=True)
class Figures:
    """Sums over the rounds of one label; emitted = accepted + rounds − cut.

    Attributes:
        runs: [γ][a] rounds that drafted γ tokens of which a were accepted; γ 0: rounds without drafts.
        num_emitted: tokens.
        num_recovered: rounds that a rejection ended.
        num_cut: rounds that ended their text at an accepted token, hence without one of the target's own.
        num_fallbacks: rounds that wanted drafts and got none.
        tested: by draft position, Σ of the probabilities that it was reached (see `StepResult.tested`).
        passed: by draft position, Σ of those that it was reached and accepted.
        reasons: (reason, rounds) of what decided γ.
        num_timed: rounds that `seconds` and `step_seconds` are of: all but those that took in a prompt.
        timed_emitted: tokens of those.
        seconds: from one result to the next.
        step_seconds: of that, the target's steps.
        draft_seconds: what drafters computed.
        target_flops: 2 · parameters · query tokens of these sequences; attention and prompts are left out.
        predictions: of the rounds that a decision made predictions for.
        regret: of the rounds that a decision had estimates for.
    """

    label: FigureLabel
    runs: tuple[tuple[int, ...], ...] = ()
    num_emitted: int = 0
    num_recovered: int = 0
    num_cut: int = 0
    num_fallbacks: int = 0
    tested: tuple[float, ...] = ()
    passed: tuple[float, ...] = ()
    reasons: tuple[tuple[str, int], ...] = ()
    num_timed: int = 0
    timed_emitted: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_flops: float = 0.0
    predictions: Predictions = Predictions()
    regret: Regret = Regret()

    @property
    def num_rounds(self) -> int:
        """With drafts and without."""
        return sum(map(sum, self.runs))

    @property
    def num_speculated(self) -> int:
        """Rounds with drafts."""
        return sum(map(sum, self.runs[1:]))

    @property
    def num_drafted(self) -> int:
        """Drafted tokens."""
        return sum(self.drafted_by_position)

    @property
    def num_accepted(self) -> int:
        """Accepted tokens."""
        return sum(self.accepted_by_position)

    @property
    def drafted_by_position(self) -> tuple[int, ...]:
        """Tokens drafted at each draft position."""
        return tuple(sum(map(sum, self.runs[position + 1 :])) for position in range(len(self.runs) - 1))

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Tokens accepted at each draft position."""
        longer = range(len(self.runs) - 1)
        return tuple(sum(sum(counts[position + 1 :]) for counts in self.runs) for position in longer)

    @property
    def acceptance(self) -> float | None:
        """Accepted / (accepted + rejected); what comes after a rejection was never tested."""
        num_tested = self.num_accepted + self.num_recovered
        return self.num_accepted / num_tested if num_tested else None

    @property
    def alphas(self) -> tuple[float, ...]:
        """α of each draft position, by its exact expectation; 0 at a position that was never reached."""
        pairs = zip(self.passed, self.tested, strict=True)
        return tuple(min(passed / tested, 1.0) if tested > 0 else 0.0 for passed, tested in pairs)

    @property
    def fallback_rate(self) -> float | None:
        """Of the rounds that wanted drafts, how many got none."""
        wanted = self.num_speculated + self.num_fallbacks
        return self.num_fallbacks / wanted if wanted else None

    @property
    def emitted_per_round(self) -> float | None:
        """Tokens."""
        return self.num_emitted / self.num_rounds if self.num_rounds else None

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds for one emitted token."""
        return self.seconds / self.timed_emitted if self.timed_emitted else None

    @property
    def step_seconds_per_round(self) -> float | None:
        """Seconds of the target's step that one round took part in."""
        return self.step_seconds / self.num_timed if self.num_timed else None

    @property
    def tokens_per_teraflop(self) -> float | None:
        """Emitted tokens for 10^12 operations of the target's forward: how much of the work was kept."""
        return self.num_emitted / self.target_flops * 1e12 if self.target_flops else None

    @property
    def reason_shares(self) -> tuple[tuple[str, float], ...]:
        """(reason, share of the rounds)."""
        return tuple((reason, count / self.num_rounds) for reason, count in self.reasons)

    def theoretical_speedup(self, draft_cost: float) -> float:
        """Σ E(γ) / Σ (1 + c·γ) over the rounds: Leviathan's formula with the bonus token, γ as it was.

        Args:
            draft_cost: c, time of drafting one token over that of a plain step.
        """
        emitted_at, survived = [1.0], (*survivals(self.alphas), *[0.0] * len(self.runs))
        for survival in survived[: len(self.runs)]:
            emitted_at.append(emitted_at[-1] + survival)
        rounds = [sum(counts) for counts in self.runs]
        emitted = sum(count * emitted_at[length] for length, count in enumerate(rounds))
        seconds = sum(count * (1 + draft_cost * length) for length, count in enumerate(rounds))
        return emitted / seconds


@dataclass(frozen=True)
class Speedup:
    """What drafting brought over rounds without drafts.

    Attributes:
        draft_cost: c as it was measured: time of drafting one token over that of a step without drafts; if
            there was none, of any step.
        theoretical: what Leviathan's formula gives for this c and the α measured.
        observed: seconds for a token without drafts over those with; None without both.
    """

    draft_cost: float
    theoretical: float
    observed: float | None

    @property
    def gap(self) -> float | None:
        """Observed less theoretical."""
        return None if self.observed is None else self.observed - self.theoretical


def speedup(drafted: Figures, plain: Figures | None) -> Speedup | None:
    """None without drafts whose rounds took time.

    Args:
        drafted: of one drafter.
        plain: of rounds that asked nobody, alike in all else; None: there were none.
    """
    slow = None if plain is None else plain.seconds_per_token
    step = (plain and plain.step_seconds_per_round) or drafted.step_seconds_per_round
    fast = drafted.seconds_per_token
    if not fast or not step or not drafted.num_drafted:
        return None
    draft_cost = drafted.draft_seconds / drafted.num_drafted / step
    observed = slow / fast if slow else None
    return Speedup(draft_cost, drafted.theoretical_speedup(draft_cost), observed)


def speedups(figures: Sequence[Figures]) -> list[Speedup | None]:
    """One for each of the figures, against those alike in all but the drafter; None for those of nobody."""
    plain = {_alike(entry): entry for entry in figures if entry.label.drafter is None}
    return [
        None if entry.label.drafter is None else speedup(entry, plain.get(_alike(entry))) for entry in figures
    ]


def _alike(figures: Figures) -> tuple[str, str, Method]:
    label = figures.label
    return label.temperature, label.traffic_class, label.method
