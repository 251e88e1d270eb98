"""The model drafter: a small causal LM with its own paged KV drafts for many sequences at once.

Each turn is one forward. A sequence that wants a draft feeds every token that its KV lacks (one after a
rejection, two after full acceptance, the prompt at first) and, once it lacks none, draws its next draft;
sequences come and go between turns, each with its own γ. Sequences whose KV does not fit lose it, least
recently used first, and are computed again when they come back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_service.drafting import Answer, SequenceKey
from draft_service.drawing import Draw, Draws, Support, draw_coupled, draw_greedy, draw_sampled, joined
from draft_service.lookup import common_prefix
from specdecode.errors import InvalidArgumentError, NumericalError, SpecdecodeError
from specdecode.lm.runner import Chunk, PagedLM
from specdecode.sampling import Window
from specdecode.types import MAX_DRAFT_TOKENS, Draft, Method, OpenDraft, Propose

_SHORT_FEED = MAX_DRAFT_TOKENS + 1
"""Most tokens that a sequence between two rounds feeds; more is a prefill."""
_NO_DISTRIBUTION = (
    "the draft model has no distribution here: its logits hold NaN, "
    "or no token that it may draft is permitted"
)


@dataclass(frozen=True)
class DraftLimits:
    """What bounds the model drafter's work.

    Attributes:
        max_draft_tokens: most tokens of one draft.
        top_k: largest support of q.
        prefill_chunk: most tokens of all prefills in one forward; a quarter of it while others draft.
    """

    max_draft_tokens: int = MAX_DRAFT_TOKENS
    top_k: int = 64
    prefill_chunk: int = 256


class ModelSequence:
    """A sequence, its KV in the draft model and the draft in the making.

    Attributes:
        kv: the committed tokens; its KV may run on into `drafted`.
        drafted: tokens drafted after the committed ones.
        supports: q at each of them, where the method needs q.
        asked_at: when the draft that waits was asked for; None while none does.
    """

    def __init__(self, drafter: ModelDrafter, key: SequenceKey, order: OpenDraft) -> None:
        self.key = key
        self.order = order
        self.kv = drafter.lm.new_sequence(order.token_ids, order.cache_salt)
        self.drafted: list[int] = []
        self.supports: list[Support] = []
        self.num_draft_tokens = 0
        self.asked_at: float | None = None
        # A router drops drafts that come too late. Where drafts are samples, that must not depend on what was
        # drawn, or stop ids, with which a draft ends sooner, would come out too often.
        sampled = order.method in (Method.REJECTION, Method.BLOCK)
        self._stop_ids = frozenset(() if sampled else order.sampling.stop_token_ids)
        self._drafter = drafter

    @property
    def committed_length(self) -> int:
        """Committed tokens known."""
        return self.kv.committed_length

    @property
    def num_missing(self) -> int:
        """Tokens to feed: for a draft all that have no KV, ahead of one all but the newest."""
        asked = self.asked_at is not None
        wanted = self.committed_length + len(self.drafted) if asked else self.committed_length - 1
        return max(wanted - self.kv.kv_len, 0)

    @property
    def is_prefill(self) -> bool:
        """Whether it lacks more than what a round leaves behind."""
        return self.num_missing > _SHORT_FEED

    @property
    def is_done(self) -> bool:
        """Whether it needs no further turn: its draft is long enough or ended by a stop id."""
        if self.asked_at is None:
            return self.num_missing == 0
        if len(self.drafted) >= self.num_draft_tokens:
            return True
        return bool(self.drafted) and self.drafted[-1] in self._stop_ids

    def missing(self, count: int) -> list[int]:
        """The first `count` tokens that have no KV."""
        start = self.kv.kv_len
        committed = self.kv.token_ids[start : start + count]
        start = max(start - self.committed_length, 0)
        return committed + self.drafted[start : start + count - len(committed)]

    def window(self) -> Window:
        """The one row that the next draft is drawn from."""
        return Window(self.order.sampling, self.kv.token_ids + self.drafted, self.order.num_prompt_tokens)

    def propose(self, order: Propose) -> None:
        """Takes the committed tokens and asks for a draft.

        KV of the common prefix stays, of accepted drafts too. The draft is shorter than asked for, or
        empty, at the end of the draft model's context.

        Raises:
            InvalidArgumentError: an id outside the vocabulary.
        """
        drafter = self._drafter
        drafter.check_tokens(order.token_ids, "token_ids")
        self._commit(order.from_length, order.token_ids)
        room = drafter.lm.max_length - self.committed_length
        self.num_draft_tokens = max(min(order.num_draft_tokens, drafter.limits.max_draft_tokens, room), 0)
        self.asked_at = time.perf_counter()
        drafter.enqueue(self)

    def _commit(self, from_length: int, token_ids: Sequence[int]) -> None:
        known = self.kv.token_ids[from_length:]
        same = common_prefix(known, token_ids)
        new = token_ids[same:]
        if same < len(known):
            self.kv.truncate(from_length + same)
        else:
            accepted = common_prefix(self.drafted, new)
            self.kv.rollback(self.committed_length + min(accepted, len(new) - 1))
        self.kv.commit(new)
        self.drafted, self.supports = [], []

    def append(self, draw: Draw) -> None:
        """Takes the next draft."""
        self.drafted.append(draw.token)
        if draw.q is not None:
            self.supports.append(draw.q)

    def answer(self, error: SpecdecodeError | None = None) -> Answer:
        """The draft as it is, or the error in its place."""
        seconds = time.perf_counter() - self.asked_at if self.asked_at is not None else 0.0
        self.asked_at = None
        drafted = () if error else tuple(self.drafted)
        q = joined(self.supports) if drafted and self.supports else None
        draft = Draft(self.key.sequence, self.committed_length, drafted, q, seconds, error)
        return Answer(self.key, draft)

    def close(self) -> None:
        """Frees everything."""
        self._drafter.forget(self)


@dataclass(frozen=True)
class _Feed:
    """One sequence's part of a turn."""

    sequence: ModelSequence
    count: int
    """Tokens to feed."""
    draws: bool
    """Whether a draft is drawn after the last of them."""


class ModelDrafter:
    """Drafts with a causal LM for many sequences (`specdecode.types.DrafterKind.MODEL`).

    A sequence's KV is computed from when it is opened, ahead of the first Propose, but until then takes
    no room from another sequence.

    Args:
        lm: the draft model.
        limits: bounds of the work.
        generator: a CPU source of the draws under `rejection` and `block`; independent of the target's noise.
    """

    def __init__(self, lm: PagedLM, limits: DraftLimits, generator: torch.Generator) -> None:
        self.lm = lm
        self.limits = limits
        self._generator = generator
        self._waiting: dict[SequenceKey, ModelSequence] = {}
        # Holders of blocks, the least recently used first.
        self._resident: dict[SequenceKey, ModelSequence] = {}

    @property
    def busy(self) -> bool:
        """Whether someone waits."""
        return bool(self._waiting)

    def open(self, key: SequenceKey, order: OpenDraft) -> ModelSequence:
        """Starts a sequence.

        Raises:
            InvalidArgumentError: an id outside the vocabulary.
        """
        self.check_tokens(order.token_ids, "token_ids")
        self.check_tokens([token for token, _ in order.sampling.logit_bias], "sampling.logit_bias")
        sequence = ModelSequence(self, key, order)
        self.enqueue(sequence)
        return sequence

    def check_tokens(self, token_ids: Sequence[int], field: str) -> None:
        """Refuses ids that the draft model does not have."""
        limit = self.lm.model.vocab_size
        largest = max(token_ids, default=0)
        if largest >= limit:
            raise InvalidArgumentError.of(field, f"id {largest} is refused; the vocabulary has {limit} ids")

    def enqueue(self, sequence: ModelSequence) -> None:
        """Work on `sequence` in the turns to come."""
        if sequence.committed_length >= self.lm.max_length:
            self._drop(sequence)  # it is never drafted for again
            if sequence.asked_at is None:
                self._waiting.pop(sequence.key, None)
                return
        self._waiting.setdefault(sequence.key, sequence)

    def forget(self, sequence: ModelSequence) -> None:
        """Frees what `sequence` holds and ends the work on it."""
        self._waiting.pop(sequence.key, None)
        self._drop(sequence)

    def abandon(self, error: SpecdecodeError) -> list[Answer]:
        """Answers every draft that waits with `error` and drops all KV: it may be half written."""
        asked = [sequence for sequence in self._waiting.values() if sequence.asked_at is not None]
        self._waiting.clear()
        for sequence in list(self._resident.values()):
            self._drop(sequence)
        return [sequence.answer(error) for sequence in asked]

    def advance(self) -> list[Answer]:
        """One forward for everyone who waits; returns the drafts that it completed."""
        answers = self._answer_done()
        feeds = self._plan()
        if feeds:
            chunks = [Chunk(f.sequence.kv, f.sequence.missing(f.count), int(f.draws)) for f in feeds]
            logits = self.lm.forward_columns(chunks)
            for feed in feeds:
                feed.sequence.kv.publish()
            answers += self._draw([feed.sequence for feed in feeds if feed.draws], logits)
            answers += self._answer_done()
        return answers

    def _answer_done(self) -> list[Answer]:
        """Takes out who needs no further turn."""
        done = [sequence for sequence in self._waiting.values() if sequence.is_done]
        for sequence in done:
            del self._waiting[sequence.key]
        return [sequence.answer() for sequence in done if sequence.asked_at is not None]

    def _plan(self) -> list[_Feed]:
        """Who feeds how much: short feeds in full, prefills share `prefill_chunk`; drafts come first."""
        ready = self._ready()
        budget = self.limits.prefill_chunk
        if not all(sequence.is_prefill for sequence in ready):
            budget = max(budget // 4, 1)
        feeds: dict[SequenceKey, _Feed] = {}
        for sequence in ready:
            missing = sequence.num_missing
            count = min(missing, budget) if sequence.is_prefill else missing
            if count and self._make_room(sequence, count, feeds):
                budget -= count if sequence.is_prefill else 0
                draws = sequence.asked_at is not None and count == missing
                feeds[sequence.key] = _Feed(sequence, count, draws)
            elif count and sequence.asked_at is None:
                del self._waiting[sequence.key]  # no room to work ahead: it waits for its Propose
        return list(feeds.values())

    def _ready(self) -> list[ModelSequence]:
        """Who waits, drafts first, without prefills that begin like another one that is under way.

        Those take what the prefix cache has when it is done: equal prompts opened together are computed once.
        """
        ready: list[ModelSequence] = []
        under_way: set[bytes] = set()
        for sequence in sorted(self._waiting.values(), key=lambda sequence: sequence.asked_at is None):
            beginning = sequence.kv.shareable_digests()[:1] if sequence.is_prefill else []
            if sequence.kv.block_table or under_way.isdisjoint(beginning):
                under_way.update(beginning)
                if sequence.kv.adopt_prefix():
                    self._resident[sequence.key] = sequence
                ready.append(sequence)
        return ready

    def _make_room(self, sequence: ModelSequence, count: int, feeds: dict[SequenceKey, _Feed]) -> bool:
        """Reserves blocks for `count` more tokens, if need be those of others who are not in this turn."""
        pool, needed = self.lm.pool, sequence.kv.blocks_missing(count)
        if sequence.asked_at is not None:
            for victim in list(self._resident.values()):
                if pool.num_free >= needed:
                    break
                if victim is not sequence and victim.key not in feeds:
                    self._drop(victim)
        if pool.num_free < needed:
            return False
        sequence.kv.reserve(count)
        self._resident.pop(sequence.key, None)
        self._resident[sequence.key] = sequence
        return True

    def _drop(self, sequence: ModelSequence) -> None:
        sequence.kv.release()
        self._resident.pop(sequence.key, None)

    def _draw(
        self,
        sequences: list[ModelSequence],
        logits: Tensor,  # [R, C], one row a sequence
    ) -> list[Answer]:
        """Appends one draft to each sequence; answers those for whom nothing can be drawn.

        What was drafted before is an answer then: dropping a draft for what comes after it would depend on
        the draft itself, and tokens without a distribution after them would come out too seldom.
        """
        rows: dict[Method, list[int]] = {}
        for row, sequence in enumerate(sequences):
            rows.setdefault(sequence.order.method, []).append(row)
        answers: list[Answer] = []
        for method, members in rows.items():
            chosen = [sequences[row] for row in members]
            picked = logits if len(members) == len(sequences) else logits[members]
            for sequence, draw in zip(chosen, self._draws(method, chosen, picked), strict=True):
                if draw is not None:
                    sequence.append(draw)
                    continue
                self.forget(sequence)
                error = None if sequence.drafted else NumericalError(_NO_DISTRIBUTION)
                answers.append(sequence.answer(error))
        return answers

    def _draws(
        self,
        method: Method,
        sequences: list[ModelSequence],
        logits: Tensor,  # [R, C]
    ) -> Draws:
        windows = [sequence.window() for sequence in sequences]
        token_ids = self.lm.model.draft_vocabulary
        if token_ids is not None and any(window.adjusts_logits for window in windows):
            logits, token_ids = self.lm.spread(logits), None
        top_k, kernels = self.limits.top_k, self.lm.model.kernels
        match method:
            case Method.GREEDY:
                return draw_greedy(logits, windows, kernels, token_ids)
            case Method.COUPLED:
                seeds = [sequence.order.seed for sequence in sequences]
                choices = [sequence.order.choice_index for sequence in sequences]
                return draw_coupled(logits, windows, seeds, choices, top_k, kernels, token_ids)
            case Method.REJECTION | Method.BLOCK:
                u = torch.rand(len(sequences), dtype=torch.float64, generator=self._generator)
                return draw_sampled(logits, windows, u, top_k, kernels, token_ids)
