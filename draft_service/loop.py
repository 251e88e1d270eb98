"""The draft service's one worker thread: it takes in frames, lets the drafters work and hands out drafts.

    take in what has arrived → advance each drafter that has work → publish what is drafted, a frame a stream

Every sequence and all KV belong to this thread. Nobody waits for it: frames go in through a queue and drafts
come out through each stream's `publish`. Whatever arrives during a turn joins the next one, so sequences
of all streams share the forwards.

A Propose replaces one of the same sequence that still waits. An error ends the sequence: it has to be
opened again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import ParamSpec, TypeVar

from draft_service.drafting import Answer, Drafter, DraftSequence, SequenceKey
from draft_service.metrics import DraftCounts
from draft_service.tracing import DraftTracer
from specdecode.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    Reason,
    ResourceExhaustedError,
    SpecdecodeError,
    UnavailableError,
)
from specdecode.telemetry.metrics import Family
from specdecode.types import Draft, DrafterKind, DraftFrame, DraftsFrame, OpenDraft, Propose

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Publish = Callable[[DraftsFrame | None], None]
"""Takes a frame of drafts, or None after the last; called from the worker thread, returns at once."""

_FULL_RETRY_SECONDS = 1.0


@dataclass(eq=False)
class DraftStream:
    """One router's stream, as the worker thread knows it.

    Attributes:
        sequences: what is open, by the router's number.
        asked: numbers whose drafts are still to come.
        refused: numbers that failed within the frame being taken in.
        drafts: published at the end of the turn.
        ending: nothing more is sent to it, so it ends when nothing is asked.
    """

    number: int
    publish: Publish
    sequences: dict[int, DraftSequence] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    drafts: list[Draft] = field(default_factory=list)
    ending: bool = False


class DraftLoop:
    """Batches the proposes of all streams.

    Args:
        drafters: what is offered; used by nobody else.
        max_sequences: sequences open at once, of all streams.
        tracer: makes spans of drafts that their routers trace; None: nobody does.

    Attributes:
        ended: done when the thread has ended, with what ended it if that was not `stop`.
    """

    def __init__(
        self,
        drafters: Mapping[DrafterKind, Drafter],
        max_sequences: int,
        tracer: DraftTracer | None = None,
    ) -> None:
        self.ended: Future[None] = Future()
        self._tracer = tracer
        self._counts = DraftCounts(drafters)
        self._drafters = dict(drafters)
        self._max_sequences = max_sequences
        self._num_sequences = 0
        self._streams: dict[int, DraftStream] = {}
        self._numbers = count()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running = True
        self._draining = False
        self._thread = threading.Thread(target=self.run, name="draft-loop", daemon=True)

    # From any thread

    @property
    def backlog(self) -> int:
        """Frames that wait to be taken in."""
        return self._orders.qsize()

    def families(self) -> list[Family]:
        """What it tells in numbers."""
        return self._counts.families(self._num_sequences)

    def start(self) -> None:
        """Runs in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Ends `run` after the turn it is in, and waits for it."""
        self._orders.put(self._stop)
        wait([self.ended])

    def connect(self, publish: Publish) -> DraftStream:
        """A new stream."""
        stream = DraftStream(next(self._numbers), publish)
        self._orders.put(lambda: self._connect(stream))
        return stream

    def submit(self, stream: DraftStream, frame: DraftFrame) -> None:
        """Hands in a frame."""
        self._orders.put(lambda: self._take_in(stream, frame))

    def finish(self, stream: DraftStream) -> None:
        """No more frames will come: the stream is ended when all its drafts are published."""
        self._orders.put(lambda: self._finish(stream))

    def disconnect(self, stream: DraftStream) -> None:
        """Frees all sequences of the stream."""
        self._orders.put(lambda: self._disconnect(stream))

    def drain(self) -> None:
        """Refuses new sequences from now on, and ends each stream that has none left."""
        self._orders.put(self._drain)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs `function` on the worker thread between two turns."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 the caller gets it
                future.set_exception(error)

        self._orders.put(run)
        return future

    # On the worker thread

    def run(self) -> None:
        """Drafts until `stop`, in the calling thread."""
        try:
            while self._running:
                self._take_in_all()
                for kind, drafter in self._drafters.items():
                    if drafter.busy:
                        self._hand_out(kind, self._advance(drafter))
                self._publish()
            self.ended.set_result(None)
        except BaseException as error:  # noqa: BLE001 whoever watches the loop gets it
            self.ended.set_exception(error)

    def _take_in_all(self) -> None:
        """Everything that has arrived; waits for something if no drafter has work."""
        if not any(drafter.busy for drafter in self._drafters.values()):
            self._orders.get()()
        for _ in range(self._orders.qsize()):
            self._orders.get()()

    def _advance(self, drafter: Drafter) -> list[Answer]:
        try:
            return drafter.advance()
        except Exception:
            # Requests go on without drafts, and the drafter starts afresh.
            logger.exception("a drafter failed; the drafts in the making are given up")
            return drafter.abandon(InternalError("the drafter failed; the service's log has the details"))

    def _take_in(self, stream: DraftStream, frame: DraftFrame) -> None:
        stream.refused.clear()
        for opened in frame.opens:
            length = len(opened.token_ids)
            self._attempt(partial(self._open, stream, opened), stream, opened.sequence, length)
        for propose in frame.proposes:
            # What was refused in this frame is answered already.
            if propose.sequence not in stream.refused:
                length = propose.committed_length
                self._attempt(partial(self._propose, stream, propose), stream, propose.sequence, length)
        for number in frame.closes:
            self._close(stream, number)

    def _attempt(self, order: Callable[[], None], stream: DraftStream, number: int, length: int) -> None:
        """Whatever the order raises is its answer; no order ends the loop."""
        try:
            order()
        except SpecdecodeError as error:
            self._fail(stream, number, length, error)
        except Exception:
            logger.exception("an order failed")
            refusal = InternalError("the order failed; the service's log has the details")
            self._fail(stream, number, length, refusal)

    def _open(self, stream: DraftStream, order: OpenDraft) -> None:
        self._check_open(stream, order)
        drafter = self._drafters[order.drafter]
        key = SequenceKey(stream.number, order.sequence)
        stream.sequences[order.sequence] = drafter.open(key, order)
        self._num_sequences += 1
        if self._tracer is not None:
            self._tracer.opened(key, order)

    def _check_open(self, stream: DraftStream, order: OpenDraft) -> None:
        if order.sequence in stream.sequences:
            message = f"sequence {order.sequence} was open already and is closed now"
            raise InvalidArgumentError(message, reason=Reason.SEQUENCE_EXISTS)
        if not 1 <= order.num_prompt_tokens <= len(order.token_ids):
            limits = f"{order.num_prompt_tokens} is refused; from 1 to the {len(order.token_ids)} token_ids"
            raise InvalidArgumentError.of("num_prompt_tokens", limits)
        if order.drafter not in self._drafters:
            offered = ", ".join(kind.value for kind in self._drafters)
            raise InvalidArgumentError.of("drafter", f"{order.drafter.value} is not offered; {offered} is")
        if self._draining:
            raise UnavailableError("the draft service is shutting down", reason=Reason.DRAINING)
        if self._num_sequences >= self._max_sequences:
            message = f"{self._max_sequences} sequences are open, as many as may be"
            raise ResourceExhaustedError(message, retry_after=_FULL_RETRY_SECONDS)

    def _propose(self, stream: DraftStream, order: Propose) -> None:
        sequence = stream.sequences.get(order.sequence)
        if sequence is None:
            message = f"sequence {order.sequence} is not open on this stream"
            raise NotFoundError(message, reason=Reason.SEQUENCE_UNKNOWN)
        known = sequence.committed_length
        if order.from_length > known:
            limit = f"{order.from_length} is refused; at most the {known} tokens known"
            raise InvalidArgumentError.of("from_length", limit)
        if order.committed_length == 0:
            raise InvalidArgumentError.of("token_ids", "no committed token is left; at least 1")
        sequence.propose(order)
        stream.asked.add(order.sequence)
        if self._tracer is not None:
            self._tracer.asked(SequenceKey(stream.number, order.sequence), order)

    def _fail(self, stream: DraftStream, number: int, committed_length: int, error: SpecdecodeError) -> None:
        """Answers with the error, which ends the sequence."""
        self._close(stream, number)
        stream.refused.add(number)
        stream.drafts.append(Draft(number, committed_length, error=error))

    def _close(self, stream: DraftStream, number: int) -> None:
        sequence = stream.sequences.pop(number, None)
        stream.asked.discard(number)
        if sequence is not None:
            sequence.close()
            self._num_sequences -= 1
            if self._tracer is not None:
                self._tracer.closed(SequenceKey(stream.number, number))

    def _connect(self, stream: DraftStream) -> None:
        self._streams[stream.number] = stream

    def _finish(self, stream: DraftStream) -> None:
        stream.ending = True

    def _disconnect(self, stream: DraftStream) -> None:
        for number in list(stream.sequences):
            self._close(stream, number)
        del self._streams[stream.number]

    def _drain(self) -> None:
        self._draining = True

    def _stop(self) -> None:
        self._running = False

    def _hand_out(self, kind: DrafterKind, answers: list[Answer]) -> None:
        if self._tracer is not None:
            self._tracer.answered(answers)
        for answer in answers:
            stream, draft = self._streams[answer.key.stream], answer.draft
            stream.asked.discard(draft.sequence)
            stream.drafts.append(draft)
            self._counts.count(kind, draft)
            if draft.error is not None:
                self._close(stream, draft.sequence)

    def _publish(self) -> None:
        for stream in self._streams.values():
            if stream.drafts:
                stream.publish(DraftsFrame(tuple(stream.drafts)))
                stream.drafts.clear()
            if (stream.ending and not stream.asked) or (self._draining and not stream.sequences):
                stream.publish(None)
