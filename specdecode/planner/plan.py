"""What a batch emits a second: off, with fixed γ, and with the policy that the router uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdecode.cost import (
    Candidate,
    DraftCosts,
    DueCandidates,
    OtherLoad,
    StepCosts,
    check_draft_cost,
    choose,
)
from specdecode.errors import InvalidArgumentError
from specdecode.planner.roofline import StepParts

LARGEST_BATCH = 4096
"""Break-even is looked for up to here, where the room in the KV cache is not known."""


class System(Protocol):
    """Where the costs of a target and its draft come from."""

    @property
    def title(self) -> str:
        """What it is."""

    def steps(self, batch: int, context: int, max_draft_tokens: int) -> StepCosts:
        """T for a batch of this context, valid up to batch·(max_draft_tokens + 1) tokens in flight."""

    def drafts(self, batch: int, context: int) -> DraftCosts:
        """What drafting costs for it."""

    def parts(self, tokens: int, batch: int, context: int) -> StepParts:
        """What the target's step goes to."""

    def slots(self, context: int, with_draft: bool) -> int | None:
        """Sequences that fit; None: not known."""


@dataclass(frozen=True)
class MeasuredSystem:
    """Costs that were measured (or published); a `System` of the planner."""

    title: str
    step_costs: StepCosts
    draft_costs: DraftCosts

    def steps(self, batch: int, context: int, max_draft_tokens: int) -> StepCosts:
        """The same for every batch."""
        return self.step_costs

    def drafts(self, batch: int, context: int) -> DraftCosts:
        """The same for every batch."""
        return self.draft_costs

    def parts(self, tokens: int, batch: int, context: int) -> StepParts:
        """By the fit."""
        costs = self.step_costs
        kv = costs.cached_token_seconds * batch * context
        return StepParts(costs.base_seconds, costs.token_seconds * tokens, kv, 0.0, costs.overhead_seconds)

    def slots(self, context: int, with_draft: bool) -> int | None:
        """Not measured."""
        return None


@dataclass(frozen=True)
class FixedDraftCost:
    """Another system with a draft pass that takes c of a plain step; a `System` of the planner."""

    system: System
    draft_cost: float

    def __post_init__(self) -> None:
        check_draft_cost(self.draft_cost)

    @property
    def title(self) -> str:
        """With c."""
        return f"{self.system.title}, c = {self.draft_cost:g}"

    def steps(self, batch: int, context: int, max_draft_tokens: int) -> StepCosts:
        """The other's."""
        return self.system.steps(batch, context, max_draft_tokens)

    def drafts(self, batch: int, context: int) -> DraftCosts:
        """c of the plain step of this batch."""
        plain = self.system.steps(batch, context, 1).step(batch, None, batch * context, batch)
        return DraftCosts(pass_seconds=self.draft_cost * plain)

    def parts(self, tokens: int, batch: int, context: int) -> StepParts:
        """The other's."""
        return self.system.parts(tokens, batch, context)

    def slots(self, context: int, with_draft: bool) -> int | None:
        """The other's."""
        return self.system.slots(context, with_draft)


@dataclass(frozen=True)
class Speed:
    """One way to decode a batch.

    Attributes:
        num_draft_tokens: γ, a mean where sequences differ.
        running: sequences in the step (those that the KV cache has room for).
        emitted: a round, by all of them.
        seconds: of a round.
    """

    num_draft_tokens: float
    running: int
    emitted: float
    seconds: float

    @property
    def throughput(self) -> float:
        """Tokens a second of the whole batch."""
        return self.emitted / self.seconds

    @property
    def per_user(self) -> float:
        """Tokens a second of one running sequence."""
        return self.throughput / self.running


@dataclass(frozen=True)
class Row:
    """One batch and context.

    Attributes:
        off: without a draft model.
        fixed: by γ.
        auto: what the policy chooses.
        price: λ at that choice.
    """

    batch: int
    context: int
    off: Speed
    fixed: dict[int, Speed]
    auto: Speed
    price: float

    @property
    def best_fixed(self) -> tuple[int, Speed]:
        """γ of the fastest, which may be slower than off."""
        length = max(self.fixed, key=lambda length: self.fixed[length].throughput)
        return length, self.fixed[length]

    def change(self, speed: Speed) -> float:
        """Of throughput against off: 0.1 is 10 % faster."""
        return speed.throughput / self.off.throughput - 1


@dataclass(frozen=True)
class Question:
    """What is planned for.

    Attributes:
        survivals: s_i of the draft's positions; as many as γ may be.
        fixed: γ to compare with.
        idle_share: φ.
    """

    survivals: tuple[float, ...]
    fixed: tuple[int, ...]
    idle_share: float = 1.0

    def __post_init__(self) -> None:
        for length in self.fixed:
            if not 1 <= length <= len(self.survivals):
                raise InvalidArgumentError.of("fixed", f"{length} is outside [1, {len(self.survivals)}]")


def plan_row(system: System, question: Question, batch: int, context: int) -> Row:
    """Everything about one batch and context."""
    alone, together = (running(system, batch, context, with_draft) for with_draft in (False, True))
    fixed = {length: fixed_speed(system, question, together, context, length) for length in question.fixed}
    auto, price = _auto_speed(system, question, together, context)
    return Row(batch, context, fixed_speed(system, question, alone, context, 0), fixed, auto, price)


def fixed_speed(system: System, question: Question, count: int, context: int, length: int) -> Speed:
    """The same γ for all of `count` sequences."""
    step = system.steps(count, context, len(question.survivals))
    seconds = step.step(count * (length + 1), None, count * context, count)
    drafting = system.drafts(count, context).round([length] * count, [context] * count)
    emitted = count * (1 + sum(question.survivals[:length]))
    return Speed(length, count, emitted, seconds + question.idle_share * drafting)


def _auto_speed(system: System, question: Question, count: int, context: int) -> tuple[Speed, float]:
    offer = Candidate("draft", question.survivals)
    choice = choose(
        [DueCandidates((offer,), num_cached_tokens=context)] * count,
        {"draft": system.drafts(count, context)},
        system.steps(count, context, len(question.survivals)),
        OtherLoad(cached_tokens=count * context),
        idle_share=question.idle_share,
    )
    mean = sum(choice.num_draft_tokens) / count
    return Speed(mean, count, choice.emitted, choice.seconds), choice.price


def running(system: System, batch: int, context: int, with_draft: bool) -> int:
    """Sequences of the batch that the KV cache has room for."""
    room = system.slots(context, with_draft)
    if room is None:
        return batch
    if room < 1:
        raise InvalidArgumentError.of(
            "context", f"the KV cache has no room for one sequence of {context} tokens"
        )
    return min(batch, room)


def largest_batch(system: System, context: int) -> int:
    """How many sequences a step can hold at all, as far as it is known."""
    room = system.slots(context, with_draft=False)
    return LARGEST_BATCH if room is None else min(LARGEST_BATCH, room)


@dataclass(frozen=True)
class PayingRange:
    """Batches at which drafting pays.

    Attributes:
        first: the smallest; above 1 where a small batch's step is too short for the draft (few experts read).
        break_even: the smallest beyond it at which no fixed γ is faster than off; None: no step holds so
            many.
    """

    first: int
    break_even: int | None

    @property
    def text(self) -> str:
        """As it stands after "pays"."""
        if self.first == 1:
            return "at every batch" if self.break_even is None else f"below batch {self.break_even}"
        return f"from batch {self.first}" + (f" to {self.break_even - 1}" if self.break_even else " on")


def paying_range(system: System, question: Question, context: int) -> PayingRange | None:
    """Where drafting pays, None for nowhere; looked for at powers of two, then between them.

    The room in the KV cache that the draft takes counts.
    """
    largest = largest_batch(system, context)
    grid = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    pays = [_pays(system, question, batch, context) for batch in grid]
    if not any(pays):
        return None
    start = pays.index(True)
    first = grid[0] if start == 0 else _turn(system, question, context, grid[start - 1], grid[start])
    if all(pays[start:]):
        return PayingRange(first, None)
    end = pays.index(False, start)
    return PayingRange(first, _turn(system, question, context, grid[end - 1], grid[end]))


def _turn(system: System, question: Question, context: int, low: int, high: int) -> int:
    """The smallest batch above `low` that is as `high` is."""
    as_high = _pays(system, question, high, context)
    while high - low > 1:
        middle = (low + high) // 2
        if _pays(system, question, middle, context) == as_high:
            high = middle
        else:
            low = middle
    return high


def _pays(system: System, question: Question, batch: int, context: int) -> bool:
    lengths = range(1, len(question.survivals) + 1)
    alone, together = (running(system, batch, context, with_draft) for with_draft in (False, True))
    off = fixed_speed(system, question, alone, context, 0).throughput
    return any(
        fixed_speed(system, question, together, context, length).throughput > off for length in lengths
    )


@dataclass(frozen=True)
class DraftOption:
    """One draft that could be used."""

    name: str
    system: System
    question: Question


def best_drafts(options: Sequence[DraftOption], batches: Sequence[int], context: int) -> list[list[Row]]:
    """[batches][options] what the policy reaches with each draft."""
    return [
        [plan_row(option.system, option.question, batch, context) for option in options] for batch in batches
    ]
