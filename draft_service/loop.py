"""The draft service's one worker thread: it takes in frames, lets the drafters work and hands out drafts.

    take in what has arrived → advance each drafter that has work → publish what is drafted, a frame a stream

Every sequence and all KV belong to this thread. Nobody waits for it: frames go in through a queue and
drafts come out through each stream's `publish`. Whatever arrives during a turn joins the next one, so
sequences of all streams share the forwards.

An error ends the sequence: it has to be opened again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import ParamSpec, TypeVar

from draft_service.drafting import Answer, Drafter, DraftSequence, SequenceKey
from specdecode.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    Reason,
    ResourceExhaustedError,
    SpecdecodeError,
)
from specdecode.types import Draft, DrafterKind, DraftFrame, DraftsFrame, OpenDraft, Propose

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_FULL_RETRY_SECONDS = 1.0


@dataclass(eq=False)
class DraftStream:
    """One router's stream, as the loop knows it.

    Attributes:
        number: unique among the loop's streams.
        publish: takes a frame of drafts; called from the worker thread, must not wait.
        sequences: open sequences by their number.
        refused: the numbers that the frame being taken in failed with.
        drafts: to be published at the end of the turn.
    """

    number: int
    publish: Callable[[DraftsFrame], None]
    sequences: dict[int, DraftSequence] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    drafts: list[Draft] = field(default_factory=list)


class DraftLoop:
    """Batches the proposes of all streams.

    Args:
        drafters: what is offered; they must be used by nobody else.
        max_sequences: sequences open at once, of all streams.
    """

    def __init__(self, drafters: Mapping[DrafterKind, Drafter], max_sequences: int) -> None:
        self._drafters = dict(drafters)
        self._max_sequences = max_sequences
        self._num_sequences = 0
        self._streams: dict[int, DraftStream] = {}
        self._numbers = count()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running = True
        self._thread = threading.Thread(target=self._run, name="draft-loop", daemon=True)

    # From any thread

    @property
    def backlog(self) -> int:
        """Frames that wait to be taken in."""
        return self._orders.qsize()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the turn it is in, and waits for it; nothing is drafted any more."""
        self._orders.put(self._end)
        self._thread.join()

    def connect(self, publish: Callable[[DraftsFrame], None]) -> DraftStream:
        """A new stream; `publish` is called from the worker thread and must not wait."""
        stream = DraftStream(next(self._numbers), publish)
        self._orders.put(lambda: self._streams.update({stream.number: stream}))
        return stream

    def submit(self, stream: DraftStream, frame: DraftFrame) -> None:
        """Hands in a frame."""
        self._orders.put(lambda: self._take_in(stream, frame))

    def disconnect(self, stream: DraftStream) -> None:
        """Frees all sequences of the stream; nothing is published to it from the next turn on."""
        self._orders.put(lambda: self._forget(stream))

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

    # From here on: the worker thread

    def _run(self) -> None:
        while self._running:
            self._take_in_all()
            for drafter in self._drafters.values():
                if drafter.busy:
                    self._hand_out(self._advance(drafter))
            self._publish()

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
            # Whatever it was, the requests go on without drafts and the next turn starts afresh.
            logger.exception("a drafter failed; the drafts that it worked on are given up")
            return drafter.abandon(InternalError("the drafter failed"))

    def _take_in(self, stream: DraftStream, frame: DraftFrame) -> None:
        stream.refused.clear()
        for opened in frame.opens:
            self._open(stream, opened)
        for propose in frame.proposes:
            self._propose(stream, propose)
        for number in frame.closes:
            self._close(stream, number)

    def _open(self, stream: DraftStream, order: OpenDraft) -> None:
        try:
            drafter = self._check_open(stream, order)
            sequence = drafter.open(SequenceKey(stream.number, order.sequence), order)
        except SpecdecodeError as error:
            self._fail(stream, order.sequence, len(order.token_ids), error)
            return
        stream.sequences[order.sequence] = sequence
        self._num_sequences += 1

    def _check_open(self, stream: DraftStream, order: OpenDraft) -> Drafter:
        if order.sequence in stream.sequences:
            raise InvalidArgumentError(
                f"sequence {order.sequence} is open already", reason=Reason.SEQUENCE_EXISTS
            )
        if not 1 <= order.num_prompt_tokens <= len(order.token_ids):
            raise InvalidArgumentError.of(
                "num_prompt_tokens",
                f"{order.num_prompt_tokens} is refused; from 1 to the {len(order.token_ids)} token_ids",
            )
        drafter = self._drafters.get(order.drafter)
        if drafter is None:
            offered = ", ".join(kind.value for kind in self._drafters)
            raise InvalidArgumentError.of("drafter", f"{order.drafter.value} is not offered; {offered} is")
        if self._num_sequences >= self._max_sequences:
            raise ResourceExhaustedError(
                f"{self._max_sequences} sequences are open, as many as may be",
                retry_after=_FULL_RETRY_SECONDS,
            )
        return drafter

    def _propose(self, stream: DraftStream, order: Propose) -> None:
        if order.sequence in stream.refused:
            return  # this frame has answered it already, with the error
        try:
            sequence = stream.sequences.get(order.sequence)
            if sequence is None:
                raise NotFoundError(f"sequence {order.sequence} is not open", reason=Reason.SEQUENCE_UNKNOWN)
            if order.from_length > sequence.committed_length:
                raise InvalidArgumentError.of(
                    "from_length",
                    f"{order.from_length} is refused; at most the {sequence.committed_length} tokens known",
                )
            if order.committed_length == 0:
                raise InvalidArgumentError.of("token_ids", "no committed tokens are left; at least 1")
            sequence.propose(order)
        except SpecdecodeError as error:
            self._fail(stream, order.sequence, order.committed_length, error)

    def _fail(self, stream: DraftStream, number: int, committed_length: int, error: SpecdecodeError) -> None:
        """Answers with the error, which ends the sequence."""
        self._close(stream, number)
        stream.refused.add(number)
        stream.drafts.append(Draft(number, committed_length, error=error))

    def _close(self, stream: DraftStream, number: int) -> None:
        sequence = stream.sequences.pop(number, None)
        if sequence is not None:
            sequence.close()
            self._num_sequences -= 1

    def _forget(self, stream: DraftStream) -> None:
        for number in list(stream.sequences):
            self._close(stream, number)
        self._streams.pop(stream.number, None)

    def _hand_out(self, answers: list[Answer]) -> None:
        for answer in answers:
            stream = self._streams[answer.key.stream]
            stream.drafts.append(answer.draft)
            if answer.draft.error is not None:
                self._close(stream, answer.key.sequence)

    def _publish(self) -> None:
        for stream in self._streams.values():
            if stream.drafts:
                stream.publish(DraftsFrame(tuple(stream.drafts)))
                stream.drafts.clear()

    def _end(self) -> None:
        self._running = False
