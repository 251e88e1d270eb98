"""What a target tells in numbers: counted by the engine a step at a time, read from other threads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdecode.cost_tables import StepCosts
from specdecode.telemetry.metrics import TOKENS, Family, Histogram, Sample, counter, gauge, histogram
from specdecode.types import LoadSnapshot, StepResult
from target_service.sequence import Work

_BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class StepCounts:
    """Sums over steps."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self._counts = dict.fromkeys(
            ("query", "prefill", "cached", "drafted", "accepted", "emitted", "failed"), 0
        )
        self._step, self._forward, self._verify = Histogram(), Histogram(), Histogram()
        self._batch, self._emitted = Histogram(_BATCHES), Histogram(TOKENS)

    def count(self, works: Sequence[Work], results: Sequence[StepResult], load: LoadSnapshot) -> None:
        """Counts a step that ran something."""
        counts = self._counts
        counts["query"] += load.tokens_in_flight
        counts["prefill"] += sum(len(work.chunk.token_ids) - work.chunk.num_logits for work in works)
        self._step.observe(load.step_seconds)
        self._batch.observe(len(works))
        if results:
            self._forward.observe(results[0].times.forward)
            self._verify.observe(results[0].times.verify)
        for result in results:
            counts["cached"] += result.num_cached_tokens
            counts["drafted"] += result.num_drafted
            counts["accepted"] += result.num_accepted
            counts["emitted"] += len(result.token_ids)
            counts["failed"] += result.error is not None
            if result.num_drafted:
                self._emitted.observe(len(result.token_ids))

    def families(self, load: LoadSnapshot, costs: StepCosts | None) -> list[Family]:
        """What was counted, and the load at the end of the last step."""
        ridge = None if costs is None or math.isinf(costs.ridge) else costs.ridge
        parts = {"step": self._step, "forward": self._forward, "verify": self._verify}
        return [
            *(_count(name, what, self._counts[key]) for name, what, key in _COUNTED),
            _count("preemptions", "Sequences that lost their KV to others", self.num_preemptions),
            *(_level(name, what, getattr(load, field)) for name, what, field in _LEVELS),
            *([] if ridge is None else [_level("ridge_tokens", "Tokens in flight at the ridge", ridge)]),
            histogram(
                "specdecode_target_step_seconds",
                "Steps and their parts",
                *(part.sample(part=name) for name, part in parts.items()),
            ),
            histogram("specdecode_target_batch_size", "Sequences of a step", self._batch.sample()),
            histogram(
                "specdecode_target_emitted_per_round",
                "Tokens of a window with drafts",
                self._emitted.sample(),
            ),
        ]


_COUNTED = (
    ("query_tokens", "Tokens that forwards were run over", "query"),
    ("prefill_tokens", "Of those, tokens that were committed before", "prefill"),
    ("prefix_hit_tokens", "Prompt tokens whose KV came from the prefix cache", "cached"),
    ("draft_tokens", "Drafted tokens verified", "drafted"),
    ("accepted_tokens", "Drafted tokens accepted", "accepted"),
    ("emitted_tokens", "Tokens emitted", "emitted"),
    ("failed_sequences", "Sequences that ended in a step with an error", "failed"),
)
_LEVELS = (
    ("running", "Sequences in the batch", "num_running"),
    ("waiting", "Sequences that wait for admission", "num_waiting"),
    ("tokens_in_flight", "Query tokens of the last step", "tokens_in_flight"),
    ("blocks", "KV blocks", "num_blocks"),
    ("free_blocks", "KV blocks that are free", "num_free_blocks"),
    ("price", "Emitted tokens that one more token in flight would cost", "price"),
    ("idle_share", "Of the time that routers were waited for, the share in which nothing ran", "idle_share"),
    ("cost_ratio", "What steps take of what the measured costs say", "cost_ratio"),
)


def _count(name: str, what: str, value: int) -> Family:
    return counter(f"specdecode_target_{name}", what, Sample(value))


def _level(name: str, what: str, value: float) -> Family:
    return gauge(f"specdecode_target_{name}", what, Sample(value))
