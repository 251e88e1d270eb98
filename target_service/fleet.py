"""Replicas that Ray places: as many of each role as are wanted, with the registry that routers watch."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from specdecode.announcing import reachable
from specdecode.config import DraftSettings, ModelServiceSettings, TargetSettings, read_settings
from specdecode.errors import FailedPreconditionError, InvalidArgumentError, SpecdecodeError
from specdecode.replicas import Replica, ReplicaRole, ReplicaState, Scale
from specdecode.serving import Running, Server, on_main_thread
from specdecode.v1 import replica_service_pb2_grpc as pb_grpc
from target_service.autoscaling import Autoscaler, ScalingRule
from target_service.cluster import Cluster, Demand
from target_service.registry import SERVICE_NAME, Registry, ReplicaServicer

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_OVERTIME_SECONDS = 5.0
"""How long after its own grace a replica may take to end before it is killed."""
_GPU_PROFILE_ACCELERATOR = "H100"
_LOOK_SECONDS = 1.0
_ENDLESS_SECONDS = 1e9


@dataclass(frozen=True)
class Kind:
    """How replicas of one role are started.

    Attributes:
        module: what `python -m` would run.
        settings: of a replica with this name.
    """

    role: ReplicaRole
    module: str
    demand: Demand
    settings: Callable[[str], ModelServiceSettings]


class Pool:
    """As many replicas of one kind as are wanted, each started again when it ends unasked.

    Attributes:
        failed: done with the error that the first start of a replica met; nobody is started again after it.
    """

    def __init__(self, kind: Kind, cluster: Cluster, registry: Registry, max_restarts: int) -> None:
        self._kind = kind
        self._cluster = cluster
        self._registry = registry
        self._max_restarts = max_restarts
        self._numbers = count(1)
        self._members: dict[str, asyncio.Task[None]] = {}
        self._retired: set[str] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.placement_seconds = _ENDLESS_SECONDS

    @property
    def size(self) -> int:
        """Replicas that are wanted."""
        return len(self._members) - len(self._retired)

    def scale(self, wanted: int) -> None:
        """Starts replicas, or drains the newest."""
        for _ in range(wanted - self.size):
            name = f"{self._kind.role.value}-{next(self._numbers)}"
            self._members[name] = asyncio.create_task(self._live(name))
        kept = [name for name in self._members if name not in self._retired]
        for name in kept[wanted:]:
            self._retire(name)

    async def stop(self, seconds: float) -> None:
        """All replicas drain; whoever runs after so many seconds is killed."""
        self.scale(0)
        members = list(self._members.values())
        if members:
            await asyncio.wait(members, timeout=seconds)
        for member in members:
            member.cancel()
        await asyncio.gather(*members, return_exceptions=True)

    def _retire(self, name: str) -> None:
        self._retired.add(name)
        known = self._registry.replicas.get(name)
        if known is None or known.model is None:
            self._members[name].cancel()  # it serves nobody yet
        else:
            self._registry.drain(name)

    async def _live(self, name: str) -> None:
        """One replica, until it is retired."""
        pause = _FIRST_PAUSE_SECONDS
        try:
            while name not in self._retired:
                error = await self._run(name)
                if name in self._retired:
                    return
                logger.error("%s: %s", name, error.message)
                self._registry.put(self._replica(name, ReplicaState.DEAD, error.message))
                if not self.failed.done():
                    self.failed.set_exception(error)
                    self.failed.exception()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        finally:
            self._registry.forget(name)
            self._retired.discard(name)
            del self._members[name]

    async def _run(self, name: str) -> SpecdecodeError:
        """Places and serves once; why it ended."""
        demand = self._kind.demand
        self._registry.put(self._replica(name, ReplicaState.STARTING, f"waits for {demand}"))
        try:
            place = await self._cluster.place(demand, self.placement_seconds)
        except SpecdecodeError as error:
            return error
        self._registry.put(self._replica(name, ReplicaState.STARTING))
        try:
            settings = self._kind.settings(name)
            ended = await self._cluster.serve(
                place, demand, name, self._kind.module, settings, self._max_restarts
            )
        except SpecdecodeError as error:
            return error
        finally:
            self._cluster.free(place)
        return FailedPreconditionError(ended.error or f"ended with exit code {ended.code}, unasked")

    def _replica(self, name: str, state: ReplicaState, detail: str = "") -> Replica:
        return Replica(name, self._kind.role, state, detail=detail)


class Fleet:
    """The pools of both roles."""

    def __init__(self, settings: TargetSettings, cluster: Cluster, registry: Registry, address: str) -> None:
        self._settings = settings
        self._cluster = cluster
        self._registry = registry
        kinds = (target_kind(settings, address), draft_kind(settings, address))
        self._targets, self._drafts = (Pool(kind, cluster, registry, settings.max_restarts) for kind in kinds)

    async def start(self) -> None:
        """Starts what the settings want, until a target is ready.

        Raises:
            SpecdecodeError: a replica finds no place in time, or can't start.
        """
        pools = (self._targets, self._drafts)
        for pool in pools:
            pool.placement_seconds = self._settings.placement_seconds
        await self.scale(Scale(self._settings.replicas, self._settings.draft_replicas))
        ready = asyncio.ensure_future(self._registry.until(self._has_ready_target))
        try:
            failures = [pool.failed for pool in pools]
            await asyncio.wait([ready, *failures], return_when=asyncio.FIRST_COMPLETED)
            for failure in failures:
                if failure.done():
                    failure.result()
        finally:
            ready.cancel()
        for pool in pools:
            pool.placement_seconds = _ENDLESS_SECONDS  # nodes may be added later

    async def scale(self, wanted: Scale) -> Scale:
        """As many replicas from now on; what is then wanted."""
        for pool, number in ((self._targets, wanted.num_targets), (self._drafts, wanted.num_drafts)):
            if number is not None:
                pool.scale(number)
        return Scale(self._targets.size, self._drafts.size)

    async def autoscale(self) -> None:
        """Until no replica is wanted; ends at once where their number is to stay."""
        rule = scaling_rule(self._settings)
        if rule is None:
            return
        scaler = Autoscaler(rule)
        while size := self._targets.size:  # none is wanted once the fleet drains
            loads = [replica.load for replica in self._ready_targets() if replica.load is not None]
            wanted = scaler.wanted(asyncio.get_running_loop().time(), size, loads)
            if wanted != size:
                logger.info("%d target replicas from now on, %d before", wanted, size)
                self._targets.scale(wanted)
            await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self) -> None:
        """Ends all replicas and leaves the cluster."""
        await asyncio.gather(*(pool.stop(_OVERTIME_SECONDS) for pool in (self._targets, self._drafts)))
        await self._cluster.close()

    def _has_ready_target(self) -> bool:
        return bool(self._ready_targets())

    def _ready_targets(self) -> list[Replica]:
        replicas = self._registry.replicas.values()
        return [r for r in replicas if r.role is ReplicaRole.TARGET and r.state is ReplicaState.READY]


def scaling_rule(settings: TargetSettings) -> ScalingRule | None:
    """When target replicas are added and taken away; None: never.

    Raises:
        InvalidArgumentError: fewer replicas at most than at start.
    """
    if settings.max_replicas is None:
        return None
    if settings.max_replicas < settings.replicas:
        limit = f"{settings.max_replicas} is below replicas, {settings.replicas}"
        raise InvalidArgumentError.of("max_replicas", limit)
    return ScalingRule(
        least=settings.replicas,
        most=settings.max_replicas,
        high_price=settings.scale_up_price,
        up_seconds=settings.scale_up_seconds,
        down_seconds=settings.scale_down_seconds,
    )


def target_kind(settings: TargetSettings, registry: str) -> Kind:
    """Targets as these settings have them, each on a port of its own."""
    accelerator = settings.accelerator_type
    if accelerator == "auto":
        accelerator = _GPU_PROFILE_ACCELERATOR if settings.device == "cuda" else None
    size, gpus, cores = settings.tensor_parallel, settings.gpus_per_rank, settings.cores_per_replica
    demand = Demand(size, gpus, cores, accelerator, _labels(settings))

    def of(name: str) -> TargetSettings:
        own = {"port": 0, "replicas": 0, "draft_replicas": 0, "registry": registry, "replica_id": name}
        return settings.model_copy(update=own)

    return Kind(ReplicaRole.TARGET, "target_service", demand, of)


def draft_kind(settings: TargetSettings, registry: str) -> Kind:
    """Drafts as environment and file have them."""
    demand = Demand(1, settings.gpus_per_draft, settings.cores_per_replica, None, _labels(settings))

    def of(name: str) -> DraftSettings:
        own = {"port": 0, "registry": registry, "replica_id": name}
        return read_settings(DraftSettings, []).model_copy(update=own)

    return Kind(ReplicaRole.DRAFT, "draft_service", demand, of)


def _labels(settings: TargetSettings) -> dict[str, str]:
    return dict(label.split("=", 1) for label in settings.node_labels)


async def start_fleet(settings: TargetSettings) -> Running:
    """Listens with the registry, joins or starts a Ray cluster, and serves once a target is ready.

    Raises:
        SpecdecodeError: no cluster, no place for a replica, or a replica that can't start.
    """
    scaling_rule(settings)  # refused before anything starts
    # First: it forks, which a process that listens by gRPC should not.
    cluster = await Cluster.connect(settings.ray_address)
    await on_main_thread(_take_signals_back)
    server = Server([SERVICE_NAME], settings.max_message_bytes, settings.exposure)
    registry = Registry()
    fleets: list[Fleet] = []

    async def scale(wanted: Scale) -> Scale:
        return await fleets[0].scale(wanted)

    pb_grpc.add_ReplicaServiceServicer_to_server(
        ReplicaServicer(registry, server.draining, scale), server.grpc
    )
    try:
        port = await server.start(settings.host, settings.port)
    except BaseException:
        await cluster.close()
        raise
    fleet = Fleet(settings, cluster, registry, reachable(settings, port))
    fleets.append(fleet)
    draining = asyncio.create_task(_drain_with(server, fleet, registry))
    try:
        await fleet.start()
    except BaseException:
        await server.drain(None)
        await fleet.stop()
        raise
    server.set_serving()
    scaling = asyncio.create_task(fleet.autoscale())
    logger.info("registry of %d target replicas on %s:%d", settings.replicas, settings.host, port)

    async def stop() -> None:
        draining.cancel()
        scaling.cancel()
        await fleet.stop()

    return Running(server, on_stopped=stop)


def _take_signals_back() -> None:
    """Ray's own handler writes a stack trace at SIGTERM before it calls ours."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.getsignal(number))


async def _drain_with(server: Server, fleet: Fleet, registry: Registry) -> None:
    """When the service begins to end, its replicas do, too; watchers see them go."""
    await server.draining.wait()
    await fleet.scale(Scale(0, 0))
    registry.wake()
