"""What the draft service knows of each choice, and what of its answers may be used.

An answer is used only while the choice waits for it, and only if it could be what was asked for: a drafter
that fails, lags or errs costs a choice its drafts for a while, never its text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from router.draft_clock import DraftClock, Timing
from router.reasons import DecisionReason, DrafterState
from router.replicas import DraftLink
from router.request import Choice
from specdecode.cost_tables import DraftCosts
from specdecode.errors import (
    InternalError,
    InvalidArgumentError,
    Reason,
    SpecdecodeError,
    UnavailableError,
)
from specdecode.types import (
    Draft,
    DrafterKind,
    DraftFrame,
    DraftsFrame,
    Method,
    ModelInfo,
    OpenDraft,
    Propose,
    SparseDistributions,
)

logger = logging.getLogger(__name__)

_LONGEST_BREAK_TOKENS = 64
_MAX_MASS_ERROR = 1e-5


def fault_of(draft: Draft, asked_length: int, num_asked: int, vocab_size: int, method: Method) -> str | None:
    """Why a draft can't be what was asked for; None if it can.

    Args:
        asked_length: committed tokens after which drafts were asked for.
        num_asked: drafts asked for.
        vocab_size: of the target.
        method: whether there may be a q; without one drafts are verified as one-hot, which is always exact.
    """
    token_ids = draft.token_ids
    if draft.committed_length != asked_length:
        return f"drafts after {draft.committed_length} tokens, asked for after {asked_length}"
    if len(token_ids) > num_asked:
        return f"{len(token_ids)} tokens, {num_asked} asked for"
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        return f"a token outside the vocabulary, 0 to {vocab_size - 1}"
    if draft.q is None:
        return None
    if method in (Method.GREEDY, Method.COUPLED):
        return f"q for {method.value}, which has none"
    return _fault_of_q(draft.q, np.asarray(token_ids, dtype=np.int64), vocab_size)


def _fault_of_q(q: SparseDistributions, drafted: np.ndarray, vocab_size: int) -> str | None:  # drafted [γ]
    sizes, support = q.sizes.astype(np.int64), q.token_ids.astype(np.int64)
    if len(sizes) != len(drafted) or sizes.sum() != len(support) or len(support) != len(q.probs):
        return "q's sizes don't add up"
    if not len(sizes):
        return None
    if sizes.min() < 1:
        return "q without support"
    if support.min() < 0 or support.max() >= vocab_size:
        return f"q outside the vocabulary, 0 to {vocab_size - 1}"
    probs = q.probs.astype(np.float64)
    if not np.isfinite(probs).all() or probs.min() < 0:
        return "q is not finite, or negative"
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    if np.abs(np.add.reduceat(probs, starts) - 1).max() > _MAX_MASS_ERROR:
        return "q's mass is not 1"
    positions = np.repeat(np.arange(len(sizes)), sizes)
    if len(np.unique(positions * vocab_size + support)) < len(support):
        return "q holds a token twice"
    sampled = (support == drafted[positions]) & (probs > 0)
    if not np.logical_or.reduceat(sampled, starts).all():
        return "a token outside q's support"
    return None


@dataclass(frozen=True)
class DraftAnswer:
    """What came of asking: drafts (maybe none), or why there are none."""

    choice: Choice
    drafter: DrafterKind
    draft: Draft
    failure: DecisionReason | None = None


AnswerTaker = Callable[[list[DraftAnswer]], None]


@dataclass(eq=False)
class DraftSeat:
    """One choice at one drafter.

    Attributes:
        sequence: its number on the stream, None while it is not open there.
        known_length: committed tokens that the drafter was told of.
        num_asked: drafts asked for and not answered yet, 0 if nothing is asked.
        taker: who gets the answer.
        num_failures: failed or late answers since the last good one.
        resume_length: committed length from which on it may be asked again.
        refused: the drafter can't take this choice, ever.
        asked_at: when drafts were asked for last, on the monotonic clock.
        is_warm: whether an answer has come since it was opened: the first one may wait for the prompt.
    """

    choice: Choice
    kind: DrafterKind
    sequence: int | None = None
    known_length: int = 0
    num_asked: int = 0
    taker: AnswerTaker | None = None
    num_failures: int = 0
    resume_length: int = 0
    refused: bool = False
    asked_at: float = 0.0
    is_warm: bool = False

    def take_break(self) -> None:
        """Counts a failure; the more there were, the later it is asked again."""
        self.num_failures += 1
        pause = min(2**self.num_failures, _LONGEST_BREAK_TOKENS)
        self.resume_length = len(self.choice.tokens) + pause


@dataclass
class _Outgoing:
    """The frame being put together."""

    opens: list[OpenDraft] = field(default_factory=list)
    proposes: list[Propose] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)


class DraftDesk:
    """Opens, asks and closes at the draft service for all replicas' loops; a choice may use several drafters,
    each of which knows nothing of it until its first draft is decided on.

    Every number on the stream is used once, so that no answer can be taken for another's.

    Attributes:
        link: set once before anything else; None if no draft service is configured.
        num_invalid: answers that could not be what was asked for.
        clock: what drafting really takes.
        is_trusted: whether q is believed to be what drafts were sampled from, which no check can see.
    """

    def __init__(self, vocab_size: int, is_trusted: bool = True) -> None:
        self.is_trusted = is_trusted
        self.link: DraftLink | None = None
        self.num_invalid = 0
        self.clock = DraftClock()
        self._vocab_size = vocab_size
        self._seats: dict[Choice, dict[DrafterKind, DraftSeat]] = {}
        self._open: dict[int, DraftSeat] = {}
        self._num_opened = 0
        self._outgoing = _Outgoing()

    @property
    def info(self) -> ModelInfo | None:
        """What the draft service offers, None while it can't be asked."""
        return self.link.info if self.link is not None and self.link.up else None

    @property
    def offered(self) -> tuple[DrafterKind, ...]:
        """Drafters that can be asked now."""
        return () if self.info is None else self.info.drafters

    @property
    def num_open(self) -> int:
        """Sequences open at the draft service."""
        return len(self._open)

    @property
    def is_reachable(self) -> bool:
        """Whether the draft service can be asked, or there is none that could."""
        return self.link is None or self.link.up

    @property
    def costs(self) -> Mapping[DrafterKind, DraftCosts]:
        """Of each drafter that was measured, as drafting takes now."""
        return {} if self.link is None else self.clock.corrected(self.link.costs)

    def state(self, choice: Choice, kind: DrafterKind) -> DrafterState:
        """Whether a drafter that is offered can be asked for a choice."""
        seat = self._seats.get(choice, {}).get(kind)
        if seat is None:
            return DrafterState.READY
        if seat.refused:
            return DrafterState.UNSUPPORTED
        if seat.num_asked:
            return DrafterState.LATE
        if len(choice.tokens) < seat.resume_length:
            return DrafterState.LATE if seat.sequence is not None else DrafterState.UNAVAILABLE
        return DrafterState.READY

    def num_unread(self, choice: Choice, kind: DrafterKind) -> int:
        """Committed tokens that the drafter has not been told of."""
        seat = self._seats.get(choice, {}).get(kind)
        is_open = seat is not None and seat.sequence is not None
        return len(choice.tokens) - (seat.known_length if seat is not None and is_open else 0)

    def room(self, choice: Choice, kind: DrafterKind) -> int | None:
        """Drafts that the drafter's context holds after what is committed; None without a limit."""
        if kind is not DrafterKind.MODEL or self.info is None:
            return None
        return self.info.max_length - len(choice.tokens)

    def open(self, choice: Choice, kind: DrafterKind) -> DraftSeat:
        """Makes the choice known, so that the drafter can take in its tokens; once."""
        seat = self._seats.setdefault(choice, {}).setdefault(kind, DraftSeat(choice, kind))
        if seat.sequence is None and self.info is not None:
            self._num_opened += 1
            seat.sequence, seat.known_length = self._num_opened, len(choice.tokens)
            seat.is_warm = False
            self._open[seat.sequence] = seat
            self._outgoing.opens.append(_open_order(seat, seat.sequence))
        return seat

    def ask(
        self,
        choice: Choice,
        kind: DrafterKind,
        num_draft_tokens: int,
        taker: AnswerTaker,
        span_id: int = 0,
    ) -> None:
        """Asks for drafts after what is committed; `taker` gets the answer, also if it comes too late.

        `span_id` is that of the round's span; 0: it has none.
        """
        seat = self.open(choice, kind)
        if seat.sequence is None:
            taker([_failed(seat, UnavailableError("the draft service is not connected"))])
            return
        seat.num_asked, seat.taker, seat.asked_at = num_draft_tokens, taker, time.monotonic()
        new = tuple(choice.tokens[seat.known_length :])
        order = Propose(seat.sequence, seat.known_length, new, num_draft_tokens, span_id)
        self._outgoing.proposes.append(order)
        seat.known_length = len(choice.tokens)

    def late(self, choice: Choice, kind: DrafterKind) -> None:
        """The answer was not there at its deadline."""
        self._seats[choice][kind].take_break()

    def recovered(self, choice: Choice, kind: DrafterKind) -> None:
        """A good answer came in time."""
        self._seats[choice][kind].num_failures = 0

    def close(self, choice: Choice) -> None:
        """Forgets a choice."""
        for seat in self._seats.pop(choice, {}).values():
            self._close_at_service(seat)

    def flush(self) -> None:
        """Sends what was ordered since the last time, in one frame."""
        outgoing, self._outgoing = self._outgoing, _Outgoing()
        if self.link is not None:
            self.link.send(
                DraftFrame(tuple(outgoing.opens), tuple(outgoing.proposes), tuple(outgoing.closes))
            )

    def take(self, frame: DraftsFrame) -> None:
        """Takes what the draft service answered and hands it to whoever asked."""
        answers: dict[AnswerTaker, list[DraftAnswer]] = {}
        self._time(frame)
        for draft in frame.drafts:
            seat = self._open.get(draft.sequence)
            if seat is None:
                continue
            answer = self._answer(seat, draft)
            if seat.num_asked and seat.taker is not None:
                seat.num_asked = 0
                answers.setdefault(seat.taker, []).append(answer)
        for taker, own in answers.items():
            taker(own)

    def lose(self) -> None:
        """The stream broke: everything that was open on it is gone, and nothing asked will be answered."""
        seats = list(self._open.values())
        self._open.clear()
        self._outgoing = _Outgoing()
        answers: dict[AnswerTaker, list[DraftAnswer]] = {}
        for seat in seats:
            seat.sequence = None
            if seat.num_asked and seat.taker is not None:
                seat.num_asked = 0
                lost = _failed(seat, UnavailableError("the draft service was lost"))
                answers.setdefault(seat.taker, []).append(lost)
        for taker, own in answers.items():
            taker(own)

    def _time(self, frame: DraftsFrame) -> None:
        now = time.monotonic()
        timings: dict[DrafterKind, list[Timing]] = {}
        for draft in frame.drafts:
            seat = self._open.get(draft.sequence)
            if seat is not None and seat.num_asked and draft.error is None:
                if seat.is_warm:
                    timing = Timing(seat.num_asked, draft.seconds, now - seat.asked_at)
                    timings.setdefault(seat.kind, []).append(timing)
                seat.is_warm = True
        for kind, own in timings.items():
            self.clock.answered(kind, own, None if self.link is None else self.link.costs.get(kind))

    def _answer(self, seat: DraftSeat, draft: Draft) -> DraftAnswer:
        if draft.error is not None:
            request = seat.choice.request
            logger.info("no draft for %s: %s", request.id, draft.error.message, extra={"fields": request.ids})
            # What `replicas` makes of a message that does not hang together.
            self.num_invalid += draft.error.reason is Reason.INVALID_ARGUMENT and isinstance(
                draft.error, InternalError
            )
            self._close_at_service(seat)
            seat.take_break()
            if isinstance(draft.error, InvalidArgumentError):
                seat.refused = True
                return DraftAnswer(seat.choice, seat.kind, draft, DecisionReason.UNSUPPORTED)
            return DraftAnswer(seat.choice, seat.kind, draft, DecisionReason.DRAFTER_UNAVAILABLE)
        method = seat.choice.resolved.method
        fault = fault_of(draft, seat.known_length, seat.num_asked, self._vocab_size, method)
        if fault is not None:
            self.num_invalid += 1
            request = seat.choice.request
            told = {"fields": request.ids}
            logger.warning("an invalid draft for %s is not used: %s", request.id, fault, extra=told)
            self._close_at_service(seat)
            seat.take_break()
            failed = Draft(draft.sequence, draft.committed_length, error=InternalError(fault))
            return DraftAnswer(seat.choice, seat.kind, failed, DecisionReason.DRAFT_INVALID)
        failure = None if draft.token_ids else DecisionReason.DRAFT_EMPTY
        return DraftAnswer(seat.choice, seat.kind, draft, failure)

    def _close_at_service(self, seat: DraftSeat) -> None:
        if seat.sequence is not None:
            self._outgoing.closes.append(seat.sequence)
            del self._open[seat.sequence]
        seat.sequence = None


def _failed(seat: DraftSeat, error: SpecdecodeError) -> DraftAnswer:
    draft = Draft(seat.sequence or 0, len(seat.choice.tokens), error=error)
    return DraftAnswer(seat.choice, seat.kind, draft, DecisionReason.DRAFTER_UNAVAILABLE)


def _open_order(seat: DraftSeat, sequence: int) -> OpenDraft:
    choice = seat.choice
    resolved = choice.resolved
    return OpenDraft(
        sequence=sequence,
        token_ids=tuple(choice.tokens),
        num_prompt_tokens=len(resolved.prompt_token_ids),
        sampling=resolved.sampling,
        method=resolved.method,
        drafter=seat.kind,
        seed=resolved.seed,
        choice_index=choice.index,
        traceparent=choice.request.traceparent,
        cache_salt=resolved.cache_salt,
        traffic_class=resolved.traffic_class,
        remembers_output=resolved.remember_output,
    )
