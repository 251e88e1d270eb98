"""Random instances of the joint choice, and the answer by trying everything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from specdecode.cost import Candidate, DraftCosts, DueCandidates, OtherLoad, StepCosts


@dataclass(frozen=True)
class Instance:
    """Everything `choose` is asked with."""

    due: tuple[DueCandidates[str], ...]
    drafts: dict[str, DraftCosts]
    steps: StepCosts
    others: OtherLoad
    idle_share: float
    round_trip_seconds: float
    max_slots: int | None


def random_survivals(rng: random.Random, length: int) -> tuple[float, ...]:
    """Falling slowly, steeply, in stairs, to 0."""
    kind, survival, found = rng.random(), 1.0, []
    for _ in range(length):
        if kind < 0.8:
            survival *= rng.choice([rng.random(), 1 - 0.3 * rng.random() ** 2, 0.8])
        else:
            survival *= rng.choice([1.0, 0.5, 0.0])
        found.append(survival)
    return tuple(found)


def random_steps(rng: random.Random, largest: int = 40) -> StepCosts:
    """A line, buckets, stairs, a concave table, a ragged one."""
    base, slope = rng.choice([1e-3, 5e-3, 2e-2]), rng.choice([0, 1e-5, 1e-4, 1e-3, 5e-3])
    cached = rng.choice([0, 1e-6])
    kind = rng.choice(["line", "buckets", "stairs", "concave", "ragged"])
    if kind == "line":
        return StepCosts(base, slope, cached, overhead_seconds=rng.choice([0, 1e-3]))
    if kind == "buckets":
        sizes = rng.sample(range(1, largest), rng.randrange(1, 8))
        return StepCosts(base, slope, cached, buckets=tuple(sorted(sizes)))
    sizes = sorted(rng.sample(range(1, largest), rng.randrange(2, 14)))
    if kind == "concave":
        seconds = [base * size**0.5 for size in sizes]
    else:
        rises = (
            [0, 0, rng.random() * base, base] if kind == "stairs" else [rng.random() * 1e-3 for _ in range(5)]
        )
        seconds = list(itertools.accumulate([base, *(rng.choice(rises) for _ in sizes[1:])]))
    table = (tuple(sizes), tuple(seconds))
    return StepCosts(base, slope, cached, 0.0, rng.random(), *table)


def random_drafts(rng: random.Random) -> DraftCosts:
    """Every part sometimes absent."""

    def part(largest: float) -> float:
        return rng.choice([0.0, rng.random() * largest])

    return DraftCosts(
        base_seconds=part(1e-3) + 1e-7,
        pass_seconds=rng.choice([0, 1e-5, rng.random() * 3e-3]),
        sequence_seconds=part(3e-4),
        token_seconds=part(3e-4),
        cached_token_seconds=part(1e-6),
        single_pass=rng.random() < 0.3,
    )


def random_instance(seed: int) -> Instance:
    """Up to 4 sequences, 3 drafters and γ = 4: at most a few thousand assignments."""
    rng = random.Random(seed)
    names = "abc"[: rng.choice([1, 1, 2, 2, 3])]
    count = rng.randrange(1, 5 if len(names) < 3 else 4)
    longest = rng.randrange(1, 5)
    if len(names) * count > 6:
        longest = min(longest, 2)
    due = tuple(
        DueCandidates(
            tuple(
                Candidate(name, random_survivals(rng, rng.randrange(1, longest + 1)))
                for name in names
                if rng.random() < 0.85
            ),
            weight=rng.choice([1.0, 1.0, 0.5, 2.0]),
            num_cached_tokens=rng.randrange(0, 300),
        )
        for _ in range(count)
    )
    return Instance(
        due=due,
        drafts={name: random_drafts(rng) for name in names},
        steps=random_steps(rng),
        others=rng.choice([OtherLoad(), OtherLoad(tokens=5, rows=3, emitted=3.0, cached_tokens=200)]),
        idle_share=rng.choice([0, 0.3, 1.0]),
        round_trip_seconds=rng.choice([0, 3e-4]),
        max_slots=rng.choice([None, None, rng.randrange(0, 8)]),
    )


Pick = tuple[int, str | None]
"""γ and drafter of one sequence."""


def assignments(instance: Instance) -> Iterator[tuple[Pick, ...]]:
    """Everything that is possible."""
    options: list[list[Pick]] = [
        [(0, None)]
        + [
            (length, candidate.drafter)
            for candidate in sequence.candidates
            for length in range(1, len(candidate.survivals) + 1)
        ]
        for sequence in instance.due
    ]
    for picks in itertools.product(*options):
        if instance.max_slots is None or sum(length for length, _ in picks) <= instance.max_slots:
            yield picks


def rate(instance: Instance, picks: tuple[Pick, ...]) -> float:
    """Emitted a second of one assignment, written out from the objective and the cost formulas."""
    emitted, num_slots = instance.others.emitted, 0
    for sequence, (length, drafter) in zip(instance.due, picks, strict=True):
        survival = {candidate.drafter: candidate.survivals for candidate in sequence.candidates}
        emitted += sequence.weight * (1 + (sum(survival[drafter][:length]) if drafter else 0))
        num_slots += length
    drafting = instance.round_trip_seconds if num_slots else 0.0
    for name, costs in instance.drafts.items():
        drafting += _draft_seconds(instance, picks, name, costs)
    fixed = len(instance.due) + num_slots
    step = instance.steps.step(
        instance.others.tokens + fixed, instance.others.rows + fixed, instance.others.cached_tokens
    )
    return emitted / (step + instance.idle_share * drafting)


def _draft_seconds(instance: Instance, picks: tuple[Pick, ...], name: str, costs: DraftCosts) -> float:
    deepest, parts = 0, 0.0
    for sequence, (length, drafter) in zip(instance.due, picks, strict=True):
        if drafter == name:
            passes = 1 if costs.single_pass else length
            parts += costs.sequence_seconds + costs.token_seconds * length
            parts += costs.cached_token_seconds * sequence.num_cached_tokens * passes
            deepest = max(deepest, length)
    if not deepest:
        return 0.0
    return costs.base_seconds + costs.pass_seconds * (1 if costs.single_pass else deepest) + parts


def best_rate(instance: Instance) -> float:
    """The largest rate there is."""
    return max(rate(instance, picks) for picks in assignments(instance))
