"""Who runs in a step: windows first, then prefill chunks, within the token budget and the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from specdecode.lm.pool import BlockPool, Digest, OutOfBlocksError
from specdecode.lm.runner import Chunk
from specdecode.types import MAX_DRAFT_TOKENS
from target_service.sequence import TargetSequence, Work

_PREFILL_SHARE = 4
"""While prompts wait to be computed, one in so many tokens of a step is theirs."""


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of a step and of the queue."""

    max_running: int = 256
    """Sequences that hold KV at once."""
    max_waiting: int = 1024
    """Sequences that wait for KV at once."""
    max_tokens_in_flight: int = 512
    """Query tokens of one step."""
    prefill_chunk: int = 256
    """Prompt tokens of one sequence in one step."""


class Scheduler:
    """Admission, the step's plan, and preemption by recompute.

    `running` is in order of admission: the youngest is preempted first.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: deque[TargetSequence] = deque()
        self.running: list[TargetSequence] = []
        self.num_preemptions = 0
        self._computing: dict[Digest, TargetSequence] = {}

    @property
    def has_work(self) -> bool:
        """Whether a plan made now could hold anything."""
        if any(s.ready or len(s.kv.missing) > 1 for s in self.running):
            return True
        # What waits behind idle sequences is admitted when one of them ends or gives way.
        return bool(self.waiting) and (not self.running or self._can_admit(self.waiting[0]))

    def plan(self) -> list[Work]:
        """The next step's work; blocks for all of it are reserved. Empty when nobody has anything to run."""
        self._admit()
        planned: dict[TargetSequence, Work] = {}
        budget = self.limits.max_tokens_in_flight
        kept_for_prefills = self._kept_for_prefills()
        for sequence in self._in_turn():
            if sequence not in self.running:
                continue  # preempted for somebody earlier in this loop
            kept = kept_for_prefills if _is_window(sequence) else 0
            work = self._work(sequence, budget - kept, planned)
            if work is not None:
                planned[sequence] = work
                budget -= len(work.chunk.token_ids)
        return [self._with_affordable_drafts(work) for work in planned.values()]

    def remove(self, sequence: TargetSequence) -> None:
        """Forgets a sequence and gives back its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def computed(self, sequence: TargetSequence) -> None:
        """After a step: publishes full blocks; once the prefix is there nobody needs to wait for it."""
        sequence.kv.publish()
        if (
            sequence.pending_digests
            and sequence.kv.kv_len >= len(sequence.pending_digests) * self.pool.block_size
        ):
            self._forget_pending(sequence)

    def _in_turn(self) -> Iterator[TargetSequence]:
        """Windows before prefills, so that a long prompt delays nobody's round; longest unserved first."""
        in_turn = sorted(self.running, key=lambda sequence: sequence.last_step)
        yield from (s for s in in_turn if _is_window(s))
        yield from (s for s in in_turn if not _is_window(s))

    def _kept_for_prefills(self) -> int:
        """Tokens of the step that windows must leave, lest a full step of windows keeps new prompts out."""
        wanted = sum(max(len(s.kv.missing) - 1, 0) for s in self.running)
        spare = max(self.limits.max_tokens_in_flight // _PREFILL_SHARE, 1)
        return min(wanted, spare, self.limits.max_tokens_in_flight - MAX_DRAFT_TOKENS - 1)

    def _work(
        self, sequence: TargetSequence, budget: int, planned: dict[TargetSequence, Work]
    ) -> Work | None:
        missing = sequence.kv.missing
        if len(missing) > 1:
            size = min(self.limits.prefill_chunk, budget, len(missing) - 1)
            if not (sequence.ready and size == len(missing) - 1):
                return self._prefill(sequence, missing[:size], planned)
        elif not sequence.ready:
            return None
        drafted = sequence.drafts()
        if len(missing) + len(drafted) > budget:
            # The last token and its drafts stay together in the next step; the prefill need not wait for
            # them.
            return self._prefill(sequence, missing[: min(budget, len(missing) - 1)], planned)
        if not self._reserve(sequence, len(missing), planned):
            return None
        chunk = Chunk(sequence.kv, [*missing, *drafted], len(drafted) + 1)
        return Work(sequence, chunk, drafted, sequence.verify)

    def _prefill(
        self, sequence: TargetSequence, token_ids: list[int], planned: dict[TargetSequence, Work]
    ) -> Work | None:
        if not token_ids or not self._reserve(sequence, len(token_ids), planned):
            return None
        return Work(sequence, Chunk(sequence.kv, token_ids, 0))

    def _with_affordable_drafts(self, work: Work) -> Work:
        """Gives a window's drafts the room that everybody's own tokens leave: speculation never preempts.

        Exact under every method: what is cut depends on the pool and on lengths, not on the drafted tokens.
        """
        kv, own = work.sequence.kv, len(work.chunk.token_ids) - len(work.drafted)
        held = (len(kv.block_table) + self.pool.num_free) * self.pool.block_size
        drafted = work.drafted[: held - kv.kv_len - own]
        kv.reserve(own + len(drafted))
        if len(drafted) == len(work.drafted):
            return work
        token_ids = [*work.chunk.token_ids[:own], *drafted]
        return Work(work.sequence, Chunk(kv, token_ids, len(drafted) + 1), drafted, work.verify)

    def _reserve(
        self, sequence: TargetSequence, num_tokens: int, planned: dict[TargetSequence, Work]
    ) -> bool:
        """Makes room, preempting the youngest that the step does not need yet; False when it had to preempt
        itself.
        """
        while True:
            try:
                sequence.kv.reserve(num_tokens)
            except OutOfBlocksError:
                victim = next(s for s in reversed(self.running) if s not in planned)
                self._preempt(victim)
                if victim is sequence:
                    return False
            else:
                return True

    def _preempt(self, sequence: TargetSequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: TargetSequence) -> None:
        self._forget_pending(sequence)
        sequence.kv.release()

    def _admit(self) -> None:
        kept: list[TargetSequence] = []
        while self.waiting and len(self.running) < self.limits.max_running:
            sequence = self.waiting.popleft()
            if self._prefix_is_being_computed(sequence):
                kept.append(sequence)
                continue
            found = sequence.kv.adopt_prefix()
            if not sequence.num_preemptions:
                sequence.num_cached_tokens = min(found, sequence.opened.num_prompt_tokens)
            if self.running and not self._fits(sequence):
                sequence.kv.release()
                kept.append(sequence)
                break
            self.running.append(sequence)
            self._announce_pending(sequence)
        self.waiting.extendleft(reversed(kept))

    def _can_admit(self, sequence: TargetSequence) -> bool:
        sequence.kv.adopt_prefix()
        fits = self._fits(sequence)
        sequence.kv.release()
        return fits and len(self.running) < self.limits.max_running

    def _fits(self, sequence: TargetSequence) -> bool:
        """Beside what the running ones still need for their own tokens, with one block of headroom for each:
        who is admitted should not be preempted at once.
        """
        needed = sum(_blocks_missing(other) for other in (*self.running, sequence))
        return needed + len(self.running) <= self.pool.num_free

    def _prefix_is_being_computed(self, sequence: TargetSequence) -> bool:
        """Whether waiting a few steps gives this sequence blocks that another one is computing now."""
        if not self.pool.prefix_cache or not self._computing:
            return False
        unknown = (d for d in sequence.kv.shareable_digests() if not self.pool.knows(d))
        return next(unknown, b"") in self._computing

    def _announce_pending(self, sequence: TargetSequence) -> None:
        if not self.pool.prefix_cache:
            return
        sequence.pending_digests = sequence.kv.shareable_digests()
        for digest in sequence.pending_digests:
            if not self.pool.knows(digest):
                self._computing.setdefault(digest, sequence)

    def _forget_pending(self, sequence: TargetSequence) -> None:
        for digest in sequence.pending_digests:
            if self._computing.get(digest) is sequence:
                del self._computing[digest]
        sequence.pending_digests = []


def _is_window(sequence: TargetSequence) -> bool:
    """Whether only the newest token, and drafts after it, are to be run."""
    return sequence.ready and len(sequence.kv.missing) == 1


def _blocks_missing(sequence: TargetSequence) -> int:
    """Blocks that its committed tokens need beyond those it holds."""
    return sequence.kv.blocks_missing(sequence.committed_length - sequence.kv.kv_len)
