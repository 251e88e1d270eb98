"""The router: admits requests, gives their choices to replicas, takes back what a lost replica had."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from router.drafts import DraftDesk
from router.estimates import EstimatesFile
from router.figures import FigureBook
from router.policy_settings import PolicySettings
from router.replicas import DraftLink, Link, Listener, TargetLink
from router.request import Choice, Request
from router.rounds import Placed, ReplicaLoop, Withdrawn
from router.text import Tokenizer
from router.validation import ModelLimits, ResolvedRequest, resolve
from specdecode import __version__
from specdecode.config import RouterSettings
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.errors import (
    CancelledError,
    NotFoundError,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
)
from specdecode.figures import Figures
from specdecode.requests import GenerateRequest, Piece, ReplicaStatus, RouterStatus
from specdecode.types import DrafterKind, ModelInfo

logger = logging.getLogger(__name__)

LONGEST_PIECE_SECONDS = 0.4
"""No client waits longer for the next piece of a text that goes on."""
_RETRY_SECONDS = 1.0
_FIRST_DRAFT_SECONDS = 10.0


class Router:
    """Everything behind the front. Build it inside the running event loop.

    Args:
        settings: operator's settings.
        tokenizer: of the model that the targets serve.
        on_availability: told whether a target can be used, whenever that changes.
    """

    def __init__(
        self, settings: RouterSettings, tokenizer: Tokenizer, on_availability: Callable[[bool], None]
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._on_availability = on_availability
        self._num_requests = 0
        self._requests: set[Request] = set()
        self._figures = FigureBook()
        self._homes: dict[Choice, ReplicaLoop] = {}
        self._homeless: dict[Choice, asyncio.TimerHandle] = {}
        self._drafts = DraftDesk(tokenizer.vocab_size)
        self._policy = PolicySettings.of(settings)
        self._estimates = EstimatesFile(settings.estimates_file)
        self._loops = [self._build_loop(address) for address in settings.targets]
        if settings.draft is not None:
            self._drafts.link = self._build_draft_link(settings.draft)
        self._tasks: list[asyncio.Task[None]] = []

    def _build_loop(self, address: str) -> ReplicaLoop:
        loop = ReplicaLoop(self._drafts, self._policy, self._estimates.estimates, self._place_elsewhere)
        listener = loop.listener(on_up=self._on_target_up, on_down=self._on_target_down)
        limit = self._settings.max_message_bytes
        loop.link = TargetLink(address, limit, self._tokenizer.fingerprint, listener)
        return loop

    def _build_draft_link(self, address: str) -> DraftLink:
        listener = Listener(lambda: None, self._drafts.take, self._drafts.lose)
        limit = self._settings.max_message_bytes
        return DraftLink(address, limit, self._tokenizer.fingerprint, listener)

    @property
    def _links(self) -> Sequence[TargetLink]:
        return [loop.link for loop in self._loops]

    @property
    def policy(self) -> PolicySettings:
        """What the operator set of the decision; a new one is in force from the next decision on."""
        return self._policy

    @policy.setter
    def policy(self, policy: PolicySettings) -> None:
        self._policy = policy
        for loop in self._loops:
            loop.policy = policy

    # Life

    async def start(self) -> asyncio.Task[None]:
        """Starts connecting and returns once a target can be used; a task that ends when a loop fails.

        Raises:
            FailedPreconditionError: a target or the draft service has another vocabulary.
        """
        links: list[Link[Any, Any]] = [*self._links]
        if self._drafts.link is not None:
            links.append(self._drafts.link)
        runs = [*(link.run() for link in links), *(loop.run() for loop in self._loops)]
        runs.append(self._estimates.run())
        self._tasks = [asyncio.create_task(run) for run in runs]
        contacts = [link.first_contact for link in self._links]
        done, _ = await asyncio.wait(contacts, return_when=asyncio.FIRST_COMPLETED)
        for contact in done:
            contact.result()
        if self._drafts.link is not None:
            await self._meet_draft(self._drafts.link)
        return asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Ends when a loop or link does, which run for ever, with whatever ended it."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()

    async def _meet_draft(self, link: DraftLink) -> None:
        """The draft service is not waited for long: it is not needed."""
        done, _ = await asyncio.wait([link.first_contact], timeout=_FIRST_DRAFT_SECONDS)
        if done:
            link.first_contact.result()
        else:
            logger.warning("draft service %s is not there yet; going on without", link.address)

    async def stop(self) -> None:
        """Closes all streams, and with them whatever they hold."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._estimates.save()

    # Requests

    async def generate(
        self, asked: GenerateRequest, deadline: float | None = None, traceparent: str = ""
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of all choices, as they come. Closing it frees all that the request holds.

        Args:
            asked: what the client wants.
            deadline: seconds since the epoch.
            traceparent: W3C trace context.
        Raises:
            SpecdecodeError: the request is refused; nothing was started.
        """
        with self._admitted():
            resolved = await self._resolve(asked)
            async with aclosing(self._run(resolved, deadline, traceparent)) as pieces:
                async for piece in pieces:
                    yield piece

    async def resolve(self, asked: GenerateRequest) -> ResolvedRequest:
        """What `run` takes; nothing is started.

        Raises:
            SpecdecodeError: the request is refused.
        """
        with self._admitted():
            return await self._resolve(asked)

    async def run(
        self, resolved: ResolvedRequest, deadline: float | None = None, traceparent: str = ""
    ) -> AsyncGenerator[Piece, None]:
        """As `generate`, of a request that was resolved before.

        Raises:
            ResourceExhaustedError: as many requests run as may.
        """
        with self._admitted():
            async with aclosing(self._run(resolved, deadline, traceparent)) as pieces:
                async for piece in pieces:
                    yield piece

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._num_requests >= self._settings.max_requests:
            message = f"{self._num_requests} requests run, as many as may"
            raise ResourceExhaustedError(message, retry_after=_RETRY_SECONDS)
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    async def _resolve(self, asked: GenerateRequest) -> ResolvedRequest:
        self.check_model(asked.model)
        return await resolve(asked, self._tokenizer, self._limits())

    async def _run(
        self, resolved: ResolvedRequest, deadline: float | None, traceparent: str
    ) -> AsyncGenerator[Piece, None]:
        request = Request(
            uuid.uuid4().hex, resolved, self._tokenizer, deadline, traceparent, self._piece_pause
        )
        self._requests.add(request)
        try:
            self._place(request.choices)
            async for piece in request.pieces():
                yield piece
        finally:
            self._withdraw(request)

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
        )

    def _withdraw(self, request: Request) -> None:
        """Takes back whatever has not ended: its client is gone."""
        self._requests.remove(request)
        for choice in request.choices:
            self._figures.add(choice.figures)
            home = self._homes.pop(choice, None)
            if choice.ended:
                continue
            choice.fail(CancelledError("the client took the request back"))
            if home is not None:
                home.put(Withdrawn(choice))
            else:
                self._settle(choice)

    # Placement

    def _place(self, choices: Sequence[Choice]) -> None:
        """Gives choices of one prompt to the replica with the fewest, or has them wait for one."""
        usable = [loop for loop in self._loops if loop.link.up and not loop.link.draining]
        homes = list(self._homes.values())
        loop = min(usable, key=homes.count, default=None)
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
        self._on_availability(True)
        homeless, self._homeless = self._homeless, {}
        for timer in homeless.values():
            timer.cancel()
        for choice in homeless:
            self._place_elsewhere(choice)

    def _on_target_down(self) -> None:
        if not any(link.up for link in self._links):
            self._on_availability(False)

    # Status

    def status(self) -> RouterStatus:
        """What GetStatus tells."""
        targets = (self._status(loop.link, loop.num_choices) for loop in self._loops)
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

    def _status(self, link: Link[Any, Any], num_sequences: int) -> ReplicaStatus:
        load = link.load if isinstance(link, TargetLink) else None
        return ReplicaStatus(link.address, link.up, link.info, load, num_sequences)
