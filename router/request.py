"""A request and its choices: what is committed, what may be said of it, and what is counted."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.figures import ChoiceFigures
from router.reasons import DecisionReason
from router.regret import Outlook
from router.text import TextStream, Tokenizer
from router.validation import ResolvedRequest
from specdecode.errors import InternalError, Reason, SpecdecodeError
from specdecode.requests import EmittedToken, Move, Piece
from specdecode.types import DrafterKind, FinishReason, Origin, RoundRecord, StepResult, Usage

if TYPE_CHECKING:
    from router.observing import Observed

MAX_BUFFERED_TOKENS = 256
"""Tokens of one choice that may wait for its client; from there on the choice gets no more orders."""


@dataclass(frozen=True)
class Round:
    """What the router knows of a round before its result is counted; seconds.

    Attributes:
        drafter: who was asked for drafts, whether or not any came; None: nobody.
        predicted_emitted: of this round, when γ was decided; 0 where no decision was made (a lease that goes
            on), as the next two.
        price: emitted tokens that one more token in flight would have cost the replica.
        tokens_in_flight: of the step that verified.
        num_parameters: of the target.
        outlook: what the decision knew of the other γ; None where it did not look.
    """

    drafter: DrafterKind | None
    reason: DecisionReason
    began: float
    draft_seconds: float = 0.0
    predicted_emitted: float = 0.0
    predicted_seconds: float = 0.0
    price: float = 0.0
    tokens_in_flight: int = 0
    num_parameters: int = 0
    outlook: Outlook | None = None


class Choice:
    """One of a request's texts: what replicas commit goes in, pieces for the client come out.

    Attributes:
        tokens: committed tokens, prompt and output.
        figures: what is measured about its rounds.
        trace: what notes its rounds for the request's trace; None where nobody wants one.
        on_room: called when a choice that was `full` has been read; whoever stopped ordering sets it.
    """

    def __init__(self, request: Request, index: int, text: TextStream) -> None:
        self.request = request
        self.index = index
        self.tokens = list(request.resolved.prompt_token_ids)
        self.finish_reason: FinishReason | None = None
        self.error: SpecdecodeError | None = None
        self.on_room: Callable[[], None] | None = None
        resolved = request.resolved
        self.figures = ChoiceFigures(resolved.sampling.temperature, resolved.traffic_class, resolved.method)
        self.trace = None if request.trace is None else request.trace.choice(index, resolved.method)
        self._is_opening = True
        self._text = text
        self._unsaid: deque[EmittedToken] = deque()
        self._said = _Said()
        self._moves: list[Move] = []
        self._counter = _UsageCounter(len(self.tokens) if index == 0 else 0, counts_cached=index == 0)

    @property
    def resolved(self) -> ResolvedRequest:
        """What was asked for."""
        return self.request.resolved

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - len(self.resolved.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens up to max_tokens."""
        return self.resolved.sampling.max_tokens - self.num_output

    @property
    def ended(self) -> bool:
        """Whether nothing more is emitted."""
        return self.finish_reason is not None or self.error is not None

    @property
    def is_full(self) -> bool:
        """Whether its client lags so far behind that it should get no more orders."""
        return len(self._said.tokens) >= MAX_BUFFERED_TOKENS

    @property
    def usage(self) -> Usage:
        """What is counted so far."""
        return self._counter.usage()

    def take(self, result: StepResult, round_: Round, now: float) -> None:
        """Takes what a step emitted, up to the first stop string."""
        if result.committed_length != len(self.tokens) + len(result.token_ids):
            self.fail(InternalError(f"the replica is at {result.committed_length} tokens; here are others"))
            return
        num_kept = self._commit(result)
        stopped = self._text.stop is not None
        self.finish_reason = FinishReason.STOP if stopped else result.finish_reason
        origins = result.origins[:num_kept]
        if self.resolved.include_rounds:
            self._said.rounds.extend(_records(self._counter.num_rounds, result, origins, round_, now))
        if self.trace is not None:
            self.trace.took(self._counter.num_rounds, result, origins, round_, now)
        self._counter.count(result, origins)
        seconds = None if self._is_opening else now - round_.began
        self.figures.count(result, origins, round_, seconds)
        if self.request.observed is not None:
            self.request.observed.took(result, round_, num_kept, seconds)
        self._is_opening = False
        if self.finish_reason is not None:
            self._finish()
        else:
            self._say()

    def fail(self, error: SpecdecodeError) -> None:
        """Ends the choice, unless it has ended; what was said stays."""
        if self.ended:
            return
        self.error = error
        self._finish()

    def moved(self, replica: str, reason: Reason) -> None:
        """The choice goes on on another replica than the one at this address, or there from anew."""
        self._moves.append(Move(replica, reason.value, self.num_output))
        self._counter.moved()
        if self.trace is not None:
            self.trace.moved(replica, reason, time.monotonic())
        self._is_opening = True

    def parked(self) -> None:
        """The choice has given back its KV until its client has caught up."""
        self._counter.parked()
        self._is_opening = True

    def take_piece(self) -> Piece | None:
        """What is to be said now, None if there is nothing; the last one has the usage."""
        said = self._said
        if not said.is_last and not said.tokens and not said.rounds:
            return None
        self._said = _Said()
        if self.on_room is not None:
            on_room, self.on_room = self.on_room, None
            on_room()
        return Piece(
            request_id=self.request.id,
            choice=self.index,
            text=said.text,
            tokens=tuple(said.tokens),
            rounds=tuple(said.rounds),
            finish_reason=self.finish_reason if said.is_last else None,
            stop=self._text.stop if said.is_last else None,
            usage=self.usage if said.is_last else None,
            error=self.error if said.is_last else None,
            report=self.figures.report() if said.is_last and self.resolved.include_report else (),
            moves=tuple(self._moves) if said.is_last else (),
        )

    def _commit(self, result: StepResult) -> int:
        """Appends the result's tokens up to the first stop string; their number."""
        num_before = len(self.tokens)
        logprobs = result.logprobs or (None,) * len(result.token_ids)
        for token in map(EmittedToken, result.token_ids, result.origins, logprobs):
            self.tokens.append(token.token_id)
            self._unsaid.append(token)
            if self._text.push(token.token_id):
                break
        return len(self.tokens) - num_before

    def _say(self) -> None:
        text, count = self._text.take()
        if count:
            self._said.text += text
            self._said.tokens.extend(self._unsaid.popleft() for _ in range(count))
        if count or self._said.rounds:
            self.request.notify()

    def _finish(self) -> None:
        if self._text.stop is None:
            self._text.finish()
        if self.trace is not None:
            self.trace.ended(None if self.error is None else self.error.reason, time.monotonic())
        self._say()
        self._said.is_last = True
        self.request.notify(urgent=True)


@dataclass
class _Said:
    """What waits for the client; `text` is the text of `tokens`."""

    text: str = ""
    tokens: list[EmittedToken] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    is_last: bool = False


class _UsageCounter:
    """Counts of one choice; emitted = accepted + bonus + recovered + plain, at any time.

    Attributes:
        num_rounds: rounds counted so far.
    """

    def __init__(self, num_prompt_tokens: int, counts_cached: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._counts_cached = counts_cached
        self._by_origin = dict.fromkeys(Origin, 0)
        self._num_cached = 0
        self._num_drafted = 0
        self.num_rounds = 0
        self._num_failovers = 0
        self._preemptions_elsewhere = 0
        self._preemptions_here = 0
        self._is_reopened = False

    def count(self, result: StepResult, origins: tuple[Origin, ...]) -> None:
        """Counts a result of which the tokens with these origins were kept."""
        if self._counts_cached and not self._is_reopened:
            self._num_cached += result.num_cached_tokens
        self._preemptions_here = result.num_preemptions
        self._num_drafted += result.num_drafted
        self.num_rounds += _num_rounds(result, origins)
        for origin in origins:
            self._by_origin[origin] += 1

    def moved(self) -> None:
        self._num_failovers += 1
        self._reopened()

    def parked(self) -> None:
        self._preemptions_elsewhere += 1
        self._reopened()

    def _reopened(self) -> None:
        self._is_reopened = True
        self._preemptions_elsewhere += self._preemptions_here
        self._preemptions_here = 0

    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached,
            num_emitted=sum(self._by_origin.values()),
            num_accepted=self._by_origin[Origin.ACCEPTED],
            num_bonus=self._by_origin[Origin.BONUS],
            num_recovered=self._by_origin[Origin.RECOVERED],
            num_plain=self._by_origin[Origin.PLAIN],
            num_drafted=self._num_drafted,
            num_rounds=self.num_rounds,
            num_failovers=self._num_failovers,
            num_preemptions=self._preemptions_elsewhere + self._preemptions_here,
        )


def _num_rounds(result: StepResult, origins: tuple[Origin, ...]) -> int:
    """A result with drafts is one round; without, each token is (leased steps may come merged)."""
    return min(len(origins), 1) if result.num_drafted else len(origins)


def _records(
    first_index: int, result: StepResult, origins: tuple[Origin, ...], round_: Round, now: float
) -> list[RoundRecord]:
    num_rounds = _num_rounds(result, origins)
    emitted = [origins] if num_rounds == 1 else [(origin,) for origin in origins]
    return [
        RoundRecord(
            index=first_index + offset,
            num_drafted=result.num_drafted,
            num_accepted=own.count(Origin.ACCEPTED),
            num_emitted=len(own),
            last_origin=own[-1],
            drafter=round_.drafter if result.num_drafted else None,
            reason=round_.reason.value,
            seconds=(now - round_.began) / num_rounds,
            draft_seconds=round_.draft_seconds,
            times=result.times,
            predicted_emitted=round_.predicted_emitted,
            predicted_seconds=round_.predicted_seconds,
            price=round_.price,
            tokens_in_flight=round_.tokens_in_flight,
        )
        for offset, own in enumerate(emitted)
    ]


class Request:
    """One call: its choices, and the pieces of them in the order in which they come."""

    def __init__(
        self,
        request_id: str,
        resolved: ResolvedRequest,
        tokenizer: Tokenizer,
        deadline: float | None = None,
        traceparent: str = "",
        pause: Callable[[], float] = lambda: 0.0,
        observed: Observed | None = None,
    ) -> None:
        """`deadline` in seconds since the epoch; `pause` tells how long a piece gathers, seconds.

        `traceparent` is the client's; where `observed` has a trace, its own goes to the other services.
        """
        self.id = request_id
        self.resolved = resolved
        self.deadline = deadline
        self.observed = observed
        self.trace = None if observed is None else observed.trace
        self.traceparent = traceparent if self.trace is None else self.trace.traceparent
        self.choices = [Choice(self, index, self._text_stream(tokenizer)) for index in range(resolved.n)]
        self._changed = asyncio.Event()
        self._pause = pause
        self._next_piece = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def ids(self) -> dict[str, str]:
        """What a log names it by."""
        if self.trace is None:
            return {"request_id": self.id}
        return {"request_id": self.id, "trace_id": f"{self.trace.context.trace_id:032x}"}

    def _text_stream(self, tokenizer: Tokenizer) -> TextStream:
        min_tokens = self.resolved.sampling.min_tokens
        return TextStream(tokenizer.detokenizer(), self.resolved.stops, min_tokens)

    def notify(self, urgent: bool = False) -> None:
        """Some choice has something to say: now if that is `urgent`, else when enough is gathered."""
        if urgent or time.monotonic() >= self._next_piece:
            self._changed.set()
        elif self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_at(self._next_piece, self._changed.set)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices, each with all that had come by then, until all have ended."""
        num_running = len(self.choices)
        while num_running:
            await self._changed.wait()
            self._changed.clear()
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
            for choice in self.choices:
                piece = choice.take_piece()
                if piece is not None:
                    num_running -= piece.usage is not None
                    yield piece
            self._next_piece = time.monotonic() + self._pause()
