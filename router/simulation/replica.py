"""One simulated replica with its drafter, and the router's loop for it, told by events.

place, or a step's end → decide for all that are due → drafts are asked, leases granted
→ a step starts once nobody is worth waiting for → its end is scheduled by what it costs
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from router.decisions import Decision, ReplicaView
from router.estimates import Estimates
from router.policy import decide
from router.policy_settings import PolicySettings
from router.reasons import DecisionReason
from router.seats import Phase
from router.simulation.machine import Machine
from router.simulation.sequence import SimulatedSequence, describe
from specdecode.types import DrafterKind, LoadSnapshot

Schedule = Callable[[float, Callable[[float], None]], None]
"""When, and what is called with that time."""

# As the target service and the router's loop have them.
_PREFILL_CHUNK = 256
_PREFILL_SHARE = 4
_PATIENCE_STEPS = 2.0
_SMOOTHING = 0.2
_EMITTED_SMOOTHING = 0.05
_WINDOW_SECONDS = 4.0
_MAX_PROBE_STEPS = 4.0


@dataclass
class Tally:
    """What was counted, of one replica or of the fleet.

    Attributes:
        num_tested: drafts that were accepted or rejected, not those after a rejected one.
        reasons: rounds by why γ was what it was.
        drafters: drafted tokens by who drafted.
    """

    num_rounds: int = 0
    num_emitted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_tested: int = 0
    num_steps: int = 0
    busy_seconds: float = 0.0
    reasons: Counter[DecisionReason] = field(default_factory=Counter)
    drafters: Counter[DrafterKind] = field(default_factory=Counter)

    def round(self, reason: DecisionReason, drafter: DrafterKind | None, drafted: int, accepted: int) -> None:
        """Counts one window."""
        self.num_rounds += 1
        self.num_emitted += accepted + 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.num_tested += accepted + (accepted < drafted)
        self.reasons[reason] += 1
        if drafter is not None and drafted:
            self.drafters[drafter] += drafted

    def add(self, other: Tally) -> None:
        """Counts another's as well."""
        for name in ("num_rounds", "num_emitted", "num_drafted", "num_accepted", "num_tested", "num_steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.busy_seconds += other.busy_seconds
        self.reasons.update(other.reasons)
        self.drafters.update(other.drafters)


class _IdleShare:
    """φ, as the target measures it."""

    def __init__(self) -> None:
        self._since = 0.0
        self._stepping = self._waiting = False
        self._idle = self._waited = 0.0

    @property
    def share(self) -> float:
        return self._idle / self._waited if self._waited > 0 else 1.0

    def change(self, now: float, *, stepping: bool, waiting: bool) -> None:
        seconds = now - self._since
        if self._waiting:
            kept = math.exp(-seconds / _WINDOW_SECONDS)
            self._waited = self._waited * kept + seconds
            self._idle = self._idle * kept + (0.0 if self._stepping else seconds)
        self._since, self._stepping, self._waiting = now, stepping, waiting


@dataclass(frozen=True)
class _Work:
    """A sequence's part of a step."""

    sequence: SimulatedSequence
    chunk: int
    window: int

    @property
    def num_tokens(self) -> int:
        return self.chunk + self.window


class SimulatedReplica:
    """Steps, drafts and decisions of one replica.

    Args:
        machine: what things cost.
        policy: what the operator set.
        estimates: of acceptance, shared by the fleet.
        schedule: calls back at a time.
        ended: told of each sequence that has all its tokens.

    Attributes:
        tally: what was counted.
        num_sequences: that run or wait here.
    """

    def __init__(
        self,
        machine: Machine,
        policy: PolicySettings,
        estimates: Estimates,
        schedule: Schedule,
        ended: Callable[[SimulatedSequence], None],
    ) -> None:
        self.tally = Tally()
        self.num_sequences = 0
        self._machine = machine
        self._policy = policy
        self._estimates = estimates
        self._schedule = schedule
        self._ended = ended
        self._offered = tuple(machine.drafts)
        self._waiting: deque[SimulatedSequence] = deque()
        self._running: list[SimulatedSequence] = []
        self._load = LoadSnapshot()
        self._idle = _IdleShare()
        self._stepping = False
        self._num_drafting = 0
        self._drafter_free_at = 0.0
        self._awaited: list[SimulatedSequence] = []
        self._usual_seconds = 0.0
        self._step_ended_at = 0.0
        self._wake_at = -1.0
        self._round_emitted = 1.0
        self._probe_seconds = 0.0

    def place(self, sequence: SimulatedSequence, now: float) -> None:
        """Takes a new sequence."""
        self.num_sequences += 1
        self._waiting.append(sequence)
        self._decide([sequence], now)
        self._consider(now)

    # The router's part

    def _decide(self, due: Sequence[SimulatedSequence], now: float) -> None:
        if not due:
            return
        self._estimates.settle()
        described = describe(due, self._offered, self._policy, self._estimates, now)
        plan = decide(described, self._view(due))
        self._probe_seconds -= plan.probe_seconds
        asked: dict[DrafterKind, list[SimulatedSequence]] = {}
        for sequence, decision in zip(due, plan.decisions, strict=True):
            self._carry_out(sequence, decision, asked, now)
        if asked:
            self._ask(asked, now)

    def _view(self, due: Sequence[SimulatedSequence]) -> ReplicaView:
        leased = sum(s.phase is Phase.ORDERED for s in due)
        ordered = [s for s in self._running if s.phase is not Phase.DUE]
        # Who waits for admission has its first token ordered; the router does not know that it waits.
        waiting = sum(s.phase is not Phase.DUE for s in self._waiting)
        return ReplicaView(
            load=self._load,
            policy=self._policy,
            steps=self._machine.steps,
            drafts=self._machine.drafts,
            round_trip_seconds=self._machine.round_trip_seconds,
            ordered_tokens=sum(s.num_asked + 1 for s in ordered) + waiting - leased,
            ordered_emitted=sum(s.predicted_emitted or 1.0 for s in ordered) + waiting - leased,
            shares_cores=self._machine.shares_cores,
            probe_seconds=self._probe_seconds,
        )

    def _carry_out(
        self,
        sequence: SimulatedSequence,
        decision: Decision,
        asked: dict[DrafterKind, list[SimulatedSequence]],
        now: float,
    ) -> None:
        sequence.decided(decision)
        if decision.num_lease_tokens > sequence.lease_ahead:
            sequence.lease(decision.num_lease_tokens, decision.reason)
        if decision.looks_up is not None:
            sequence.look_up(decision.looks_up)
        if decision.drafter is None:
            return
        if decision.num_draft_tokens == 0:
            self._open(sequence, decision.drafter, now)
            return
        sequence.phase, sequence.drafter = Phase.DRAFTING, decision.drafter
        sequence.reason, sequence.num_asked = decision.reason, decision.num_draft_tokens
        asked.setdefault(decision.drafter, []).append(sequence)

    # The drafter's part

    def _open(self, sequence: SimulatedSequence, kind: DrafterKind, now: float) -> None:
        """The drafter takes in the text, before anything that it is asked later."""
        if kind in sequence.opened:
            return
        sequence.opened.add(kind)
        costs = self._machine.drafts.get(kind)
        if costs is not None and not costs.single_pass:
            seconds = costs.token_seconds * sequence.num_tokens
            self._drafter_free_at = max(self._drafter_free_at, now) + seconds

    def _ask(self, asked: dict[DrafterKind, list[SimulatedSequence]], now: float) -> None:
        """Drafters of one round follow one another."""
        for kind, sequences in asked.items():
            for sequence in sequences:
                self._open(sequence, kind, now)
            seconds = self._machine.drafts[kind].round(
                [s.num_asked for s in sequences], [float(s.num_tokens) for s in sequences]
            )
            self._drafter_free_at = max(self._drafter_free_at, now) + seconds
            answered_at = self._drafter_free_at + self._machine.round_trip_seconds
            deadline = now + self._policy.draft_deadline_seconds
            self._num_drafting += len(sequences)
            if answered_at > deadline:
                for sequence in sequences:
                    sequence.late_until = answered_at
                self._schedule(deadline, partial(self._give_up, sequences))
            else:
                self._schedule(answered_at, partial(self._take_drafts, sequences))
        self._idle.change(now, stepping=self._stepping, waiting=True)

    def _give_up(self, sequences: Sequence[SimulatedSequence], now: float) -> None:
        for sequence in sequences:
            sequence.lease(1, DecisionReason.DRAFTER_LATE, sequence.drafter)
        self._drafting_ended(len(sequences), now)

    def _take_drafts(self, sequences: Sequence[SimulatedSequence], now: float) -> None:
        for sequence in sequences:
            if sequence.says_nothing:
                sequence.learn_of_nothing()
                sequence.lease(1, DecisionReason.DRAFT_EMPTY, sequence.drafter)
            else:
                sequence.phase, sequence.num_drafted = Phase.ORDERED, sequence.num_asked
                sequence.lease_end = sequence.num_output
        self._drafting_ended(len(sequences), now)

    def _drafting_ended(self, count: int, now: float) -> None:
        self._num_drafting -= count
        self._idle.change(now, stepping=self._stepping, waiting=self._num_drafting > 0)
        self._consider(now)

    # The target's part

    def _consider(self, now: float) -> None:
        """Starts a step if there is one to run and nobody is worth waiting for."""
        if self._stepping:
            return
        while self._waiting and len(self._running) < self._machine.max_running:
            self._running.append(self._waiting.popleft())
        ready = sum(s.lacking > 0 or s.is_ready for s in self._running)
        if not ready:
            return
        start = self._step_ended_at + self._patience_seconds(ready + len(self._waiting))
        if self._machine.shares_cores and self._num_drafting:
            start = max(start, self._drafter_free_at)
        if now >= start:
            self._start_step(now)
        elif self._wake_at != start:
            self._wake_at = start
            self._schedule(start, self._consider)

    def _patience_seconds(self, ready: int) -> float:
        drafting = sum(sequence.phase is Phase.DRAFTING for sequence in self._awaited)
        return min(drafting / ready, _PATIENCE_STEPS) * self._usual_seconds

    def _start_step(self, now: float) -> None:
        works = self._works()
        tokens = sum(work.num_tokens for work in works)
        rows = sum(work.window for work in works)
        cached = sum(work.sequence.num_tokens - work.sequence.lacking for work in works)
        seconds = self._machine.steps.step(tokens, rows, cached, len(works))
        self._stepping = True
        self._idle.change(now, stepping=True, waiting=self._num_drafting > 0)
        self._schedule(now + seconds, partial(self._end_step, works, seconds, (tokens, rows, cached)))

    def _works(self) -> list[_Work]:
        """Windows first, then prefill chunks, those first that ran the longest time ago."""
        budget = self._machine.max_tokens_in_flight
        lacking = [s for s in self._running if s.lacking > 0]
        kept = min(budget // _PREFILL_SHARE, sum(s.lacking for s in lacking))
        works: list[_Work] = []
        in_turn = sorted(self._running, key=lambda s: s.last_step)
        for sequence in in_turn:
            if not sequence.lacking and sequence.is_ready:
                window = 1 + sequence.num_drafted
                # The first always fits, or a window longer than the budget would never run.
                if window <= budget - kept or not works:
                    works.append(_Work(sequence, 0, window))
                    budget -= window
        for sequence in lacking:
            chunk = min(sequence.lacking, _PREFILL_CHUNK, budget)
            if chunk > 0:
                has_window = chunk == sequence.lacking and sequence.is_ready and chunk < budget
                works.append(_Work(sequence, chunk, int(has_window)))
                budget -= chunk + has_window
        return works

    def _end_step(
        self, works: Sequence[_Work], seconds: float, counts: tuple[int, int, int], now: float
    ) -> None:
        self._stepping = False
        self.tally.num_steps += 1
        self.tally.busy_seconds += seconds
        for work in works:
            work.sequence.lacking -= work.chunk
            work.sequence.last_step = self.tally.num_steps
        ran = [work.sequence for work in works if work.window]
        for sequence in ran:
            self._run_window(sequence, now)
        self._running = [s for s in self._running if s.num_remaining]
        self._note_step(seconds, counts, ran, now)
        self._decide(list(self._due(ran)), now)
        self._idle.change(now, stepping=False, waiting=self._num_drafting > 0)
        self._consider(now)

    def _run_window(self, sequence: SimulatedSequence, now: float) -> None:
        reason, drafter, drafted = sequence.reason, sequence.drafter, sequence.num_drafted
        if not sequence.num_output:
            sequence.first_token_at = now
        accepted, emitted = sequence.run_window()
        self.tally.round(reason, drafter, drafted, accepted)
        if drafted:
            self._round_emitted += (emitted - self._round_emitted) * _EMITTED_SMOOTHING
        if not sequence.num_remaining:
            sequence.ended_at = now
            self.num_sequences -= 1
            self._ended(sequence)
        elif not sequence.lease_ahead:
            sequence.phase = Phase.DUE

    def _due(self, ran: Iterable[SimulatedSequence]) -> Iterable[SimulatedSequence]:
        return (s for s in ran if s.num_remaining and (s.phase is Phase.DUE or s.lease_runs_low))

    def _note_step(
        self, seconds: float, counts: tuple[int, int, int], ran: Sequence[SimulatedSequence], now: float
    ) -> None:
        """The load snapshot and whatever else is learnt of a step."""
        usual = self._usual_seconds
        self._usual_seconds += (seconds - usual) * (_SMOOTHING if usual else 1.0)
        self._step_ended_at = now
        self._awaited = [s for s in ran if s.num_remaining and s.phase is Phase.DUE]
        saved = self._probe_seconds + self._policy.probe_share * seconds
        self._probe_seconds = min(saved, _MAX_PROBE_STEPS * seconds)
        ordered = [s for s in self._running if s.is_ready and s.lacking <= _PREFILL_CHUNK]
        windows = min(sum(1 + s.num_drafted for s in ordered), self._machine.max_tokens_in_flight)
        prefill = sum(min(s.lacking, _PREFILL_CHUNK) for s in self._running)
        self._load = LoadSnapshot(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            tokens_in_flight=counts[0],
            num_rows=counts[1],
            num_cached_tokens=counts[2],
            step_seconds=seconds,
            num_ordered=len(ordered),
            num_ordered_tokens=windows,
            num_prefill_tokens=min(prefill, self._machine.max_tokens_in_flight - windows),
            expected_emitted=sum(self._round_emitted if s.num_drafted else 1.0 for s in ordered),
            idle_share=self._idle.share,
        )
