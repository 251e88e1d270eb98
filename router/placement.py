"""Which replica a request goes to: pure arithmetic on what the router knows of each.

A request is expected to take, on a replica, what is queued there, its own prefill (what the prefix cache does
not hold), and its share of the steps while it decodes, which grows with what runs there already. Steps cost
what the replica measured; the price λ says what a further token in flight costs the others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from specdecode.cost_tables import StepCosts
from specdecode.types import LoadSnapshot

STAY_SHARE = 0.8
"""A request that has a home leaves it only for a replica that takes less than this share of the time."""
_UNMEASURED = StepCosts(base_seconds=0.02, token_seconds=0.001, prefill_share=0.5)
"""Of replicas that did not measure themselves: only their order matters, not the seconds."""


@dataclass(frozen=True)
class Demand:
    """What a request brings.

    Attributes:
        num_prompt_tokens: committed tokens that need KV, what was emitted elsewhere included.
        num_output_tokens: expected.
        num_choices: texts of the same prompt.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_choices: int = 1


@dataclass(frozen=True)
class Standing:
    """One replica that could take the request.

    Attributes:
        load: of its last step.
        costs: of its steps, None where it did not measure them.
        num_choices: of this router that run there, or are on their way.
        unseen_tokens: prompt tokens that this router sent there and that no step has told of yet.
        cached_tokens: of this request's prompt that its prefix cache should hold.
    """

    load: LoadSnapshot
    costs: StepCosts | None
    num_choices: int
    unseen_tokens: int = 0
    cached_tokens: int = 0


def expected_seconds(demand: Demand, standing: Standing) -> float:
    """Seconds until the request would have ended there."""
    costs, load = standing.costs or _UNMEASURED, standing.load
    ratio = load.cost_ratio if load.cost_ratio > 0 else 1.0
    # Other routers' sequences are in the load alone, ours on their way in our own count alone.
    running = max(load.num_running + load.num_waiting, standing.num_choices)
    cached = load.num_cached_tokens / max(load.num_running, 1) * running
    together = running + demand.num_choices
    step = costs.step(together, together, cached + demand.num_choices * demand.num_prompt_tokens, together)
    token = costs.token_seconds * costs.prefill_share or step / max(together, 1)
    missing = max(demand.num_prompt_tokens - standing.cached_tokens, 0)
    queued = max(load.num_prefill_tokens, standing.unseen_tokens)
    turns = 1.0 + _waiting_share(load)
    decoding = demand.num_output_tokens * step * (1.0 + max(load.price, 0.0))
    return ratio * ((missing + queued) * token * turns + decoding)


def _waiting_share(load: LoadSnapshot) -> float:
    """How long the replica's queue is, beside what runs."""
    return load.num_waiting / max(load.num_running, 1)


def place(
    demand: Demand, standings: Sequence[Standing], home: int | None, chance: random.Random
) -> int | None:
    """Index of the replica to take; None if there is none.

    Two drawn at random are compared, besides the home and the one that holds most of the prompt: routers
    that see the same loads at the same time do not all choose the same replica. Away from the home only where
    that is clearly faster.

    Args:
        home: where the request's conversation was last, if that replica is still there.
    """
    if not standings:
        return None
    indices = range(len(standings))
    drawn = chance.sample(indices, min(2, len(standings)))
    warmest = max(indices, key=lambda index: standings[index].cached_tokens)
    if standings[warmest].cached_tokens:
        drawn.append(warmest)
    seconds = {index: expected_seconds(demand, standings[index]) for index in drawn}
    best = min(seconds, key=lambda index: (seconds[index], standings[index].num_choices))
    if home is None or home == best:
        return best
    stay = expected_seconds(demand, standings[home])
    return best if seconds[best] < STAY_SHARE * stay else home
