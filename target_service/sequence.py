"""A sequence as the target sees it, and what one step does for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from specdecode.lm.pool import Digest
from specdecode.lm.runner import Chunk
from specdecode.lm.sequence import KVSequence
from specdecode.types import FinishReason, OpenSequence, SamplingParams, SparseDistributions, Verify


class SequenceKey(NamedTuple):
    """Names a sequence across routers: the stream it came by, and its number there."""

    stream: int
    sequence: int


@dataclass(eq=False)
class TargetSequence:
    """One open sequence: its order from the router, its KV, and what it may still emit.

    It is *due* when it has neither drafts to verify nor a lease left: it then waits for the router.
    """

    key: SequenceKey
    opened: OpenSequence
    kv: KVSequence
    verify: Verify | None = None
    lease_end: int = 0
    """Committed length up to which tokens may be emitted without drafts."""
    lease_span_id: int = 0
    """Of the span that the newest lease is for; 0: it has none."""
    ordered_at: float = 0.0
    """When the order that is being served arrived, in the engine's clock."""
    last_step: int = -1
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    reported: bool = False
    pending_digests: list[Digest] = field(default_factory=list)
    """Prefix blocks that others may wait for while this sequence computes them."""

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.opened.sampling

    @property
    def committed_length(self) -> int:
        """Prompt and output so far."""
        return self.kv.committed_length

    @property
    def num_output(self) -> int:
        """Tokens emitted so far, those that Open brought along included."""
        return self.committed_length - self.opened.num_prompt_tokens

    @property
    def room(self) -> int:
        """Tokens it may still emit."""
        return self.sampling.max_tokens - self.num_output

    @property
    def lease_left(self) -> int:
        """Tokens it may emit without asking the router."""
        return max(self.lease_end - self.committed_length, 0)

    @property
    def ready(self) -> bool:
        """Whether there is an order to serve."""
        return self.verify is not None or self.lease_left > 0

    def drafts(self) -> tuple[int, ...]:
        """Drafts to verify: never so many that a token past max_tokens could be emitted."""
        return self.verify.drafted[: self.room - 1] if self.verify else ()

    def finish_of(self, token_ids: list[int]) -> tuple[int, FinishReason | None]:
        """How many of these next tokens belong to the sequence, and why it ends with the last of them if it
        does.
        """
        stops = self.sampling.stop_token_ids
        for count, token in enumerate(token_ids[: self.room], start=1):
            if token in stops:
                return count, FinishReason.STOP
        if len(token_ids) >= self.room:
            return self.room, FinishReason.LENGTH
        return len(token_ids), None


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: a piece of its prefill, or its window (last token and drafts) as
    well.
    """

    sequence: TargetSequence
    chunk: Chunk
    drafted: tuple[int, ...] = ()
    verify: Verify | None = None
    """The order that the window serves; None: a lease."""

    @property
    def has_window(self) -> bool:
        """Whether tokens come out of it; otherwise it only computes KV."""
        return self.chunk.num_logits > 0

    @property
    def q(self) -> SparseDistributions | None:
        """q of the drafted tokens, None for one-hot; only what `trust_draft` lets be believed."""
        return self.verify.q if self.verify and self.sequence.opened.trust_draft else None
