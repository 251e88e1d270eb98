"""A fleet run through a workload: events in the order of their times, placement, and what came out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from router.estimates import Estimates
from router.policy_settings import PolicySettings
from router.simulation.machine import Machine
from router.simulation.replica import SimulatedReplica, Tally
from router.simulation.sequence import SimulatedSequence, Way, resolved_request
from router.simulation.workload import SimulatedRequest, TextOdds
from specdecode.errors import InvalidArgumentError

MAX_REPLICAS = 10_000


@dataclass(frozen=True)
class Served:
    """One request that has all its tokens; times in seconds since the start."""

    request: SimulatedRequest
    num_output: int
    first_token_at: float
    ended_at: float

    @property
    def token_seconds(self) -> float:
        """Between two tokens after the first, on average."""
        return (self.ended_at - self.first_token_at) / max(self.num_output - 1, 1)

    @property
    def first_seconds(self) -> float:
        """From its arrival to its first token."""
        return self.first_token_at - self.request.at


@dataclass(frozen=True)
class Outcome:
    """What one way to decode did with the workload.

    Attributes:
        seconds: from the first arrival to the last token.
        tally: of all replicas.
        utilisation: of each replica, share of `seconds` in which it stepped.
        served: every request, in the order of ending.
    """

    way: Way
    seconds: float
    tally: Tally
    utilisation: tuple[float, ...]
    served: tuple[Served, ...]

    @property
    def throughput(self) -> float:
        """Emitted tokens a second of the fleet."""
        return self.tally.num_emitted / self.seconds

    @property
    def mean_draft_tokens(self) -> float:
        """γ of a round, rounds without drafts included."""
        return self.tally.num_drafted / self.tally.num_rounds

    @property
    def acceptance(self) -> float | None:
        """accepted / (accepted + rejected); None where nothing was drafted."""
        tested = self.tally.num_tested
        return self.tally.num_accepted / tested if tested else None

    @property
    def mean_token_seconds(self) -> float:
        """Time per token of a request, averaged over requests."""
        return float(np.mean([one.token_seconds for one in self.served]))

    def token_seconds(self, percentile: float) -> float:
        """Time per token, of requests."""
        return float(np.percentile([one.token_seconds for one in self.served], percentile))

    def first_seconds(self, percentile: float) -> float:
        """Time to first token."""
        return float(np.percentile([one.first_seconds for one in self.served], percentile))


class _Clock:
    """Events by their times; equal ones in the order of scheduling."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def schedule(self, at: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def run(self) -> None:
        """Until nothing is scheduled."""
        while self._events:
            at, _, event = heapq.heappop(self._events)
            event(at)


def simulate(
    requests: Sequence[SimulatedRequest],
    machine: Machine,
    way: Way,
    num_replicas: int = 1,
    seed: int = 0,
    policy: PolicySettings | None = None,
) -> Outcome:
    """Runs the workload to its end; the same arguments give the same outcome.

    Args:
        requests: in the order of their times, at least one.
        machine: every replica's.
        way: how they are decoded.
        num_replicas: of the fleet.
        seed: of the texts' odds.
        policy: what the operator set; the defaults unless given.
    """
    if not 1 <= num_replicas <= MAX_REPLICAS:
        raise InvalidArgumentError.of("replicas", f"{num_replicas} is outside [1, {MAX_REPLICAS}]")
    if not requests:
        raise InvalidArgumentError.of("requests", "there are none")
    clock, estimates, served = _Clock(), Estimates(), list[Served]()

    def end(sequence: SimulatedSequence) -> None:
        assert sequence.ended_at is not None
        times = (sequence.first_token_at, sequence.ended_at)
        served.append(Served(sequence.request, sequence.num_output, *times))

    replicas = [
        SimulatedReplica(machine, policy or PolicySettings(), estimates, clock.schedule, end)
        for _ in range(num_replicas)
    ]

    def arrive(request: SimulatedRequest, now: float) -> None:
        odds, resolved = TextOdds.of(request, seed), resolved_request(request, way)
        sequence = SimulatedSequence(request, odds, resolved, request.prompt_tokens - 1)
        min(replicas, key=lambda replica: replica.num_sequences).place(sequence, now)

    for request in requests:
        clock.schedule(request.at, partial(arrive, request))
    clock.run()
    return _outcome(way, requests[0].at, replicas, served)


def _outcome(
    way: Way, began: float, replicas: Sequence[SimulatedReplica], served: Sequence[Served]
) -> Outcome:
    seconds = max(one.ended_at for one in served) - began
    tally = Tally()
    for replica in replicas:
        tally.add(replica.tally)
    utilisation = tuple(replica.tally.busy_seconds / seconds for replica in replicas)
    return Outcome(way, seconds, tally, utilisation, tuple(served))
