"""The router: admits requests, gives their choices to replicas, takes back what a lost replica had."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from router.access import ANYONE, Caller
from router.admission import Admission, Ticket
from router.draft_source import DraftSource
from router.drafts import DraftDesk
from router.estimates import EstimatesFile
from router.figures import FigureBook
from router.homes import Homes
from router.metering import Meter
from router.observing import Observed, Observer
from router.policy_settings import PolicySettings
from router.replicas import DraftLink, Link, Listener, TargetLink
from router.request import Choice, Request
from router.rounds import Placed, ReplicaLoop, Withdrawn
from router.targets import Crew, Targets
from router.text import Tokenizer
from router.validation import ModelLimits, OperatorLimits, ResolvedRequest, resolve
from specdecode import __version__
from specdecode.config import RouterSettings
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.errors import (
    CancelledError,
    NotFoundError,
    Reason,
    ResourceExhaustedError,
    SpecdecodeError,
    UnavailableError,
)
from specdecode.figures import Figures
from specdecode.requests import LONGEST_PIECE_SECONDS, GenerateRequest, Piece, ReplicaStatus, RouterStatus
from specdecode.telemetry import Tracing
from specdecode.telemetry.meters import Meters, within
from specdecode.telemetry.metrics import Family
from specdecode.types import DrafterKind, ModelInfo

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_FIRST_DRAFT_SECONDS = 10.0


class Router:
    """Everything behind the front. Build it inside the running event loop.

    Args:
        settings: operator's settings.
        tokenizer: of the model that the targets serve.
        on_availability: told whether a target can be used, whenever that changes.
        tracing: where spans go, closed by `stop`; None: nowhere.
    """

    def __init__(
        self,
        settings: RouterSettings,
        tokenizer: Tokenizer,
        on_availability: Callable[[bool], None],
        tracing: Tracing | None = None,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._on_availability = on_availability
        self._num_requests = 0
        self._requests: set[Request] = set()
        self._figures = FigureBook()
        self._meter = Meter()
        self._admission = Admission(
            self._capacity, settings.max_waiting_tokens, lambda: self._policy.batch_weight
        )
        self._placing = Homes()
        self._homes: dict[Choice, ReplicaLoop] = {}
        self._homeless: dict[Choice, asyncio.TimerHandle] = {}
        self._drafts = DraftDesk(tokenizer.vocab_size, settings.believes_draft)
        self._observer = Observer(settings, tracing, self._draft_model)
        self._policy = PolicySettings.of(settings)
        self._estimates = EstimatesFile(settings.estimates_file)
        self._crew = Crew()
        limit = settings.max_message_bytes
        self._targets = Targets(settings.targets, limit, self._build_loop, self._crew, settings.mesh)
        self._draft_source = None if settings.draft is None else self._source_of_drafts(settings.draft)
        self.meters: Meters | None = None

    def _build_loop(self, address: str) -> ReplicaLoop:
        loop = ReplicaLoop(
            self._drafts,
            self._policy,
            self._estimates.estimates,
            self._place_elsewhere,
            self._settings.park_seconds,
        )
        listener = loop.listener(on_up=self._on_target_up, on_down=self._on_target_down)
        limit = self._settings.max_message_bytes
        loop.link = TargetLink(address, limit, self._tokenizer.fingerprint, listener, self._settings.mesh)
        loop.link.pool = self._served
        return loop

    def _source_of_drafts(self, source: str) -> DraftSource:
        limit = self._settings.max_message_bytes
        return DraftSource(
            source, limit, self._build_draft_link, self._drafts, self._crew, self._settings.mesh
        )

    def _build_draft_link(self, address: str) -> DraftLink:
        listener = Listener(lambda: None, self._drafts.take, self._drafts.lose)
        limit = self._settings.max_message_bytes
        return DraftLink(address, limit, self._tokenizer.fingerprint, listener, self._settings.mesh)

    def _served(self) -> list[ModelInfo]:
        """What the targets serve that are in use."""
        return [link.info for link in self._links if link.up and link.info is not None]

    @property
    def _links(self) -> Sequence[TargetLink]:
        return [loop.link for loop in self._targets.loops]

    @property
    def policy(self) -> PolicySettings:
        """What the operator set of the decision; a new one is in force from the next decision on."""
        return self._policy

    @policy.setter
    def policy(self, policy: PolicySettings) -> None:
        self._policy = policy
        for loop in self._targets.loops:
            loop.policy = policy

    # Life

    async def start(self) -> asyncio.Task[None]:
        """Starts connecting and returns once a target can be used; a task that ends when a loop fails.

        Raises:
            FailedPreconditionError: a target or the draft service has another vocabulary.
        """
        if self._draft_source is not None:
            self._crew.add(self._draft_source.run())
        self._crew.add(self._estimates.run())
        self._targets.start()
        self.meters = Meters(self._settings, within(asyncio.get_running_loop(), self.families))
        await self._targets.met()
        if self._draft_source is not None:
            await self._meet_draft(self._draft_source)
        return asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Ends when a loop or link fails, with what it failed with."""
        await self._crew.failed

    async def _meet_draft(self, source: DraftSource) -> None:
        """The draft service is not waited for long: it is not needed."""
        done, _ = await asyncio.wait([source.met], timeout=_FIRST_DRAFT_SECONDS)
        if done:
            source.met.result()
        else:
            logger.warning("draft service %s is not there yet; going on without", source.source)

    async def stop(self) -> None:
        """Closes all streams, and with them whatever they hold."""
        await self._crew.stop()
        self._estimates.save()
        if self.meters is not None:
            await asyncio.to_thread(self.meters.close)
        await self._observer.close()

    # Requests

    async def generate(
        self,
        asked: GenerateRequest,
        deadline: float | None = None,
        traceparent: str = "",
        caller: Caller = ANYONE,
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of all choices, as they come. Closing it frees all that the request holds.

        Args:
            asked: what the client wants.
            deadline: seconds since the epoch.
            traceparent: W3C trace context.
            caller: who asks.
        Raises:
            SpecdecodeError: the request is refused; nothing was started.
        """
        with self._observer.watch(asked, traceparent) as observed, self._admitted(caller):
            resolved = await self._resolve(asked, caller)
            async with aclosing(self._run(resolved, deadline, traceparent, caller, observed)) as pieces:
                async for piece in pieces:
                    yield piece

    async def resolve(
        self, asked: GenerateRequest, traceparent: str = "", caller: Caller = ANYONE
    ) -> ResolvedRequest:
        """What `run` takes; nothing is started.

        Raises:
            SpecdecodeError: the request is refused.
        """
        try:
            with self._admitted(caller):
                return await self._resolve(asked, caller)
        except SpecdecodeError:
            with self._observer.watch(asked, traceparent):
                raise

    async def run(
        self,
        asked: GenerateRequest,
        resolved: ResolvedRequest,
        deadline: float | None = None,
        traceparent: str = "",
        caller: Caller = ANYONE,
    ) -> AsyncGenerator[Piece, None]:
        """As `generate`, of a request that was resolved before.

        Raises:
            ResourceExhaustedError: as many requests run as may.
        """
        with self._observer.watch(asked, traceparent) as observed, self._admitted(caller):
            async with aclosing(self._run(resolved, deadline, traceparent, caller, observed)) as pieces:
                async for piece in pieces:
                    yield piece

    @contextmanager
    def _admitted(self, caller: Caller) -> Iterator[None]:
        """Refuses what there is no room for, before any work."""
        if self._num_requests >= self._settings.max_requests:
            message = f"{self._num_requests} requests run or wait, as many as may"
            raise ResourceExhaustedError(message, retry_after=self._admission.retry_seconds)
        self._meter.check(caller)
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    async def _resolve(self, asked: GenerateRequest, caller: Caller) -> ResolvedRequest:
        self.check_model(asked.model)
        resolved = await resolve(asked, self._tokenizer, self._limits())
        return replace(resolved, cache_salt=caller.salt(resolved.cache_salt))

    async def _run(
        self,
        resolved: ResolvedRequest,
        deadline: float | None,
        traceparent: str,
        caller: Caller,
        observed: Observed,
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of a request, from its turn on."""
        num_prompt_tokens = len(resolved.prompt_token_ids)
        ticket = Ticket(caller, resolved.tier, resolved.n, num_prompt_tokens, deadline)
        with self._meter.counted(caller):
            async with (
                self._admission.turn(ticket),
                aclosing(self._pieces(resolved, deadline, traceparent, observed)) as pieces,
            ):
                self._meter.used(caller, num_prompt_tokens)
                async for piece in pieces:
                    self._meter.used(caller, len(piece.tokens))
                    self._admission.used(ticket, len(piece.tokens))
                    yield piece

    async def _pieces(
        self, resolved: ResolvedRequest, deadline: float | None, traceparent: str, observed: Observed
    ) -> AsyncGenerator[Piece, None]:
        request = observed.request = Request(
            uuid.uuid4().hex,
            resolved,
            self._tokenizer,
            deadline,
            traceparent,
            self._piece_pause,
            observed,
        )
        self._requests.add(request)
        try:
            self._place(request.choices)
            async for piece in request.pieces():
                observed.said()
                yield piece
        finally:
            self._withdraw(request)

    def _draft_model(self) -> str:
        link = self._drafts.link
        return link.info.name if link is not None and link.info is not None else ""

    def _capacity(self) -> int:
        """Choices that the targets that can be used may run; without one, what one may: they wait for it."""
        return self._settings.max_running * max(sum(link.up for link in self._links), 1)

    def _piece_pause(self) -> float:
        """Seconds between two pieces of a request: writing more of them would take the models' cores."""
        return min(self._num_requests * self._settings.piece_seconds, LONGEST_PIECE_SECONDS)

    @property
    def model_name(self) -> str:
        """What the targets call their model; before one was met, what the operator does."""
        return next((info.name for info in self._infos), self._settings.model)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that every target takes.

        Raises:
            UnavailableError: none was met yet.
        """
        contexts = [info.max_length for info in self._infos]
        if not contexts:
            raise UnavailableError("no target replica has been met yet", retry_after=_RETRY_SECONDS)
        return min(contexts)

    @property
    def step_costs(self) -> StepCosts | None:
        """What the first target measured of its steps; None where it did not."""
        return next((link.costs for link in self._links if link.costs is not None), None)

    @property
    def draft_costs(self) -> Mapping[DrafterKind, DraftCosts]:
        """What the draft service measured of its drafters, as it is corrected by what they take."""
        return self._drafts.costs

    @property
    def _infos(self) -> list[ModelInfo]:
        return [link.info for link in self._links if link.info is not None]

    def check_model(self, name: str) -> None:
        """Refuses a name that is not served; an empty one is whatever is.

        Raises:
            NotFoundError: with the name that is.
        """
        served = {self._settings.model, *(info.name for info in self._infos)}
        if name and name not in served:
            raise NotFoundError(
                f"model: {name!r} is not served; {self.model_name!r} is, also for an empty name"
            )

    def _limits(self) -> ModelLimits:
        return ModelLimits(
            vocab_size=self._tokenizer.vocab_size,
            max_length=self.max_length,
            max_prompt_bytes=self._settings.max_prompt_bytes,
            operator=OperatorLimits.of(self._settings),
        )

    def _withdraw(self, request: Request) -> None:
        """Takes back whatever has not ended: its client is gone."""
        self._requests.remove(request)
        for choice in request.choices:
            self._figures.add(choice.figures)
            home = self._homes.pop(choice, None)
            if home is not None:
                self._placing.ended(choice, home)
            if choice.ended:
                continue
            choice.fail(CancelledError("the client took the request back"))
            if home is not None:
                home.put(Withdrawn(choice))
            else:
                self._settle(choice)

    # Placement

    def _place(self, choices: Sequence[Choice]) -> None:
        """Gives choices of one prompt to the replica that has them soonest, or has them wait for one."""
        usable = [loop for loop in self._targets.loops if loop.link.up and not loop.link.draining]
        loop = self._placing.choose(choices, usable, self._homes.values())
        for choice in choices:
            if loop is None:
                self._homes.pop(choice, None)
                self._wait_for_target(choice)
            else:
                self._homes[choice] = loop
                loop.put(Placed(choice))

    def _place_elsewhere(self, choice: Choice) -> None:
        if not choice.ended:
            self._place([choice])

    def _wait_for_target(self, choice: Choice) -> None:
        seconds = self._settings.failover_seconds
        expire = asyncio.get_running_loop().call_later(seconds, self._expire, choice)
        self._homeless[choice] = expire

    def _expire(self, choice: Choice) -> None:
        self._settle(choice)
        lost = choice.num_output > 0
        choice.fail(
            UnavailableError(
                f"no target replica within {self._settings.failover_seconds:g} s",
                reason=Reason.REPLICA_LOST if lost else Reason.NO_REPLICA,
                retry_after=_RETRY_SECONDS,
            )
        )

    def _settle(self, choice: Choice) -> None:
        """Forgets a choice that has no replica."""
        timer = self._homeless.pop(choice, None)
        if timer is not None:
            timer.cancel()
        self._drafts.close(choice)
        self._drafts.flush()

    def _on_target_up(self) -> None:
        for loop in self._targets.loops:
            loop.prefixes.capacity = 0 if loop.link.info is None else loop.link.info.num_blocks
        self._on_availability(True)
        homeless, self._homeless = self._homeless, {}
        for timer in homeless.values():
            timer.cancel()
        for choice in homeless:
            self._place_elsewhere(choice)
        self._admission.wake()

    def _on_target_down(self) -> None:
        if not any(link.up for link in self._links):
            self._on_availability(False)

    # Status

    def status(self) -> RouterStatus:
        """What GetStatus tells."""
        targets = (self._status(loop.link, loop.num_choices) for loop in self._targets.loops)
        draft = self._drafts.link
        return RouterStatus(
            targets=tuple(targets),
            drafts=() if draft is None else (self._status(draft, self._drafts.num_open),),
            num_requests=self._num_requests,
            version=__version__,
        )

    def figures(self) -> tuple[Figures, ...]:
        """What GetFigures tells: all rounds since the start, running requests' included."""
        running = [choice.figures for request in self._requests for choice in request.choices]
        return self._figures.figures(running)

    def families(self) -> list[Family]:
        """What is told to whoever collects metrics; to be called within the event loop.

        `specdecode.telemetry.exposition.render` makes text of it.
        """
        return self._observer.families(self.figures(), self.status())

    def _status(self, link: Link[Any, Any], num_sequences: int) -> ReplicaStatus:
        load = link.load if isinstance(link, TargetLink) else None
        return ReplicaStatus(link.address, link.up, link.info, load, num_sequences)
