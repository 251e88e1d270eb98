"""A target of the test's own: real gRPC, costs and load as the test says, a strict eye on orders.

Every step runs whatever has an order, one after another without any pause; a step emits the same token for
everyone and accepts of each draft as many as the script says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdecode.cost_tables import StepCosts
from specdecode.serving import server_options
from specdecode.types import (
    DecodeFrame,
    FinishReason,
    Lease,
    LoadSnapshot,
    ModelInfo,
    OpenSequence,
    Origin,
    StepFrame,
    StepResult,
    Verify,
)
from specdecode.v1 import target_service_pb2 as pb
from specdecode.v1 import target_service_pb2_grpc as pb_grpc
from specdecode.wire import (
    decode_frame_from_proto,
    load_snapshot_to_proto,
    model_info_to_proto,
    step_costs_to_proto,
    step_frame_to_proto,
)

TOKEN = 9
LATE_SECONDS = 0.02
Accepts = Callable[["Running", Verify], int]
"""How many of a sequence's drafts are accepted."""


@dataclass
class Running:
    """One open sequence."""

    opened: OpenSequence
    length: int
    verify: Verify | None = None
    lease_end: int = 0

    @property
    def num_output(self) -> int:
        return self.length - self.opened.num_prompt_tokens

    @property
    def has_order(self) -> bool:
        return self.verify is not None or self.lease_end > self.length


@dataclass
class ScriptedTarget(pb_grpc.TargetServiceServicer):  # type: ignore[misc]
    """Decodes by a script.

    Attributes:
        load: of every step; the test may change it at any time.
        pause_seconds: between two steps.
        renewals_are_late: a lease that is renewed arrives when the one before has been used up.
        orders: every frame that was taken.
        violations: what no router may send.
    """

    info: ModelInfo
    costs: StepCosts | None
    load: LoadSnapshot
    accepts: Accepts
    orders: list[DecodeFrame] = field(default_factory=list)
    running: dict[int, Running] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    num_steps: int = 0
    renewals_are_late: bool = False
    pause_seconds: float = 0.0
    late: list[Lease] = field(default_factory=list)

    async def GetTargetModel(self, request: Any, context: Any) -> Any:
        costs = None if self.costs is None else step_costs_to_proto(self.costs)
        return pb.GetTargetModelResponse(
            model=model_info_to_proto(self.info), load=load_snapshot_to_proto(self.load), costs=costs
        )

    async def Decode(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.running.clear()
        changed = asyncio.Event()
        reader = asyncio.create_task(self._read(requests, changed))
        try:
            while True:
                await self._next_orders(changed)
                while results := self._step():
                    yield step_frame_to_proto(StepFrame(self.num_steps, self.load, tuple(results)))
                    # Orders that have come meanwhile are taken in first, as a real engine does.
                    await asyncio.sleep(self.pause_seconds)
        finally:
            reader.cancel()

    async def _next_orders(self, changed: asyncio.Event) -> None:
        """A frame, or a lease that has been on its way for long enough."""
        try:
            await asyncio.wait_for(changed.wait(), LATE_SECONDS if self.late else None)
        except TimeoutError:
            self._take_late()
        changed.clear()

    async def _read(self, requests: AsyncIterator[Any], changed: asyncio.Event) -> None:
        async for request in requests:
            self._take(decode_frame_from_proto(request))
            changed.set()

    def _take(self, frame: DecodeFrame) -> None:
        self.orders.append(frame)
        self._take_late()
        for opened in frame.opens:
            self.running[opened.sequence] = Running(opened, len(opened.token_ids))
        for verify in frame.verifies:
            sequence = self.running[verify.sequence]
            if verify.committed_length != sequence.length or sequence.has_order:
                self.violations.append(f"{verify} while {sequence.length} are committed")
            sequence.verify, sequence.lease_end = verify, 0
        for lease in frame.leases:
            if not lease.num_tokens:
                self.violations.append(f"{lease} allows nothing")
            running = self.running.get(lease.sequence)
            if running is not None and running.has_order and self.renewals_are_late:
                self.late.append(lease)
            elif running is not None:
                if lease.committed_length + lease.num_tokens < running.lease_end:
                    self.violations.append(f"{lease} shortens one up to {running.lease_end}")
                running.lease_end = lease.committed_length + lease.num_tokens
        for number in frame.closes:
            self.running.pop(number, None)

    def _take_late(self) -> None:
        """Leases that were on their way, as soon as their sequences have nothing to run."""
        for lease in list(self.late):
            sequence = self.running.get(lease.sequence)
            if sequence is None or not sequence.has_order:
                self.late.remove(lease)
            if sequence is not None and not sequence.has_order:
                sequence.lease_end = lease.committed_length + lease.num_tokens

    def _step(self) -> list[StepResult]:
        ready = [(number, sequence) for number, sequence in self.running.items() if sequence.has_order]
        self.num_steps += bool(ready)
        return [self._run(number, sequence) for number, sequence in ready]

    def _run(self, number: int, sequence: Running) -> StepResult:
        verify, sequence.verify = sequence.verify, None
        drafted = () if verify is None else verify.drafted
        accepted = 0 if verify is None else self.accepts(sequence, verify)
        last = Origin.PLAIN if not drafted else Origin.BONUS if accepted == len(drafted) else Origin.RECOVERED
        room = sequence.opened.sampling.max_tokens - sequence.num_output
        ids = (*drafted[:accepted], TOKEN)[:room]
        sequence.length += len(ids)
        ended = sequence.num_output >= sequence.opened.sampling.max_tokens
        if ended:
            del self.running[number]
        return StepResult(
            sequence=number,
            committed_length=sequence.length,
            token_ids=ids,
            origins=((Origin.ACCEPTED,) * accepted + (last,))[:room],
            num_drafted=len(drafted),
            num_accepted=min(accepted, len(ids)),
            tested=tuple(float(i <= accepted) for i in range(len(drafted))),
            passed=tuple(float(i < accepted) for i in range(len(drafted))),
            lease_left=max(sequence.lease_end - sequence.length, 0),
            finish_reason=FinishReason.LENGTH if ended else None,
        )


@asynccontextmanager
async def scripted_target(
    fingerprint: str,
    costs: StepCosts | None,
    load: LoadSnapshot,
    accepts: Accepts,
) -> AsyncIterator[tuple[ScriptedTarget, str]]:
    """A running scripted target and its address."""
    info = ModelInfo("scripted", fingerprint, 300, 4096, "", "", block_size=16, num_blocks=1000)
    service = ScriptedTarget(info, costs, load, accepts)
    server = grpc.aio.server(options=server_options(1 << 24))
    pb_grpc.add_TargetServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
