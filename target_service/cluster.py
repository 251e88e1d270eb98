"""Ray, as far as it is used: places for replicas, and processes that are started again there.

Data never goes through Ray; routers and replicas talk by gRPC.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specdecode.config import MIB, ServiceSettings
from specdecode.errors import FailedPreconditionError, SpecdecodeError, UnavailableError
from specdecode.lifetime import die_with
from specdecode.serving import Running, configure_logging, run_until_signalled

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_ENVIRONMENT = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    # Ray's own 15 would have replicas stand back for whatever else runs.
    "RAY_worker_niceness": "0",
}
_OBJECT_STORE_BYTES = 80 * MIB
"""The least that Ray takes: nothing of ours goes through it."""


@dataclass(frozen=True)
class Demand:
    """What one replica needs, all of it on one node.

    Attributes:
        num_ranks: processes that share the model.
        gpus, cores: of each rank.
        accelerator: kind of GPU; None: any.
        labels: that the node must have.
    """

    num_ranks: int = 1
    gpus: float = 0.0
    cores: float = 1.0
    accelerator: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of all ranks, as Ray names them."""
        resources = {"CPU": self.cores * self.num_ranks, "GPU": self.gpus * self.num_ranks}
        if self.accelerator is not None and self.gpus:
            resources[f"accelerator_type:{self.accelerator}"] = 0.001
        # Ray refuses a bundle of nothing.
        return {name: amount for name, amount in resources.items() if amount} or {"CPU": 0.001}

    def __str__(self) -> str:
        parts = [f"{amount:g} {name}" for name, amount in self.bundle.items()]
        parts += [f"label {name}={value}" for name, value in self.labels.items()]
        return ", ".join(parts)

    def is_met_by(self, node: Node) -> bool:
        """Whether the node has it when nobody else is there."""
        return not self._missing(node) and all(node.labels.get(n) == v for n, v in self.labels.items())

    def unmet(self, nodes: Sequence[Node]) -> str:
        """Why none of these nodes takes the replica, in words."""
        if any(self.is_met_by(node) for node in nodes):
            return f"{self} is there, but taken"
        labelled = [n for n in nodes if all(n.labels.get(k) == v for k, v in self.labels.items())]
        if not labelled:
            wanted = ", ".join(f"{name}={value}" for name, value in self.labels.items())
            return f"no node of the cluster has label {wanted}"
        lacking = min((self._missing(node) for node in labelled), key=len)
        most = (
            f"{name} (most on one node: {max(n.resources.get(name, 0) for n in nodes):g})" for name in lacking
        )
        return f"no node of the cluster has enough {', '.join(most)}"

    def _missing(self, node: Node) -> list[str]:
        wanted = self.bundle.items()
        return [name for name, amount in wanted if node.resources.get(name, 0) < amount]


@dataclass(frozen=True)
class Node:
    """A machine of the cluster and all that it has."""

    id: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """Where a replica may run: a placement group that is there."""

    group: Any
    node: str


@dataclass(frozen=True)
class Ended:
    """How a service ended: its exit code, and the error if it could not start."""

    code: int
    error: str = ""


class ServiceActor:
    """A process in which one service runs, as it would by `python -m`.

    `serve` is the only call: it takes the process's first thread, on which models run.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        """Ray puts it before each line of the log."""
        return self._name

    def serve(self, module: str, settings: ServiceSettings) -> Ended:
        """Runs `module`'s service until it is asked to drain."""
        configure_logging(settings.section, settings.log_level)
        die_with(os.getppid())  # Ray's node, which ends when whoever started it is killed
        start = importlib.import_module(f"{module}.__main__").start
        refusals: list[str] = []

        async def started() -> Running:
            try:
                running: Running = await start(settings)
            except SpecdecodeError as error:
                refusals.append(error.message)
                raise
            return running

        code = run_until_signalled(started, settings.drain_seconds)
        return Ended(code, refusals[0] if refusals else "")


class Cluster:
    """A Ray cluster that this process has joined, or started; use `connect`."""

    def __init__(self) -> None:
        self._replicas: Counter[str] = Counter()

    @classmethod
    async def connect(cls, address: str | None) -> Self:
        """Joins the cluster at host:port, or at the address that `auto` finds; None starts one that ends with
        this process.

        Raises:
            UnavailableError: nobody answers there.
            FailedPreconditionError: the cluster runs other versions.
        """
        if address not in (None, "auto"):
            await _check_reachable(address)
        try:
            await asyncio.to_thread(_init, address)
        except (ConnectionError, TimeoutError) as error:
            raise UnavailableError(f"ray_address {address}: {error}") from None
        except (RuntimeError, ValueError) as error:
            raise FailedPreconditionError(f"ray_address {address}: {error}") from None
        return cls()

    async def close(self) -> None:
        """Leaves the cluster; one that was started here ends, with all its processes."""
        await asyncio.to_thread(ray.shutdown)

    async def place(self, demand: Demand, seconds: float) -> Place:
        """Waits for resources, on the node with the fewest replicas if there is a choice.

        Raises:
            UnavailableError: not within `seconds`; names what is missing.
        """
        node = await asyncio.to_thread(self._emptiest, demand)
        group = placement_group(
            [demand.bundle],
            strategy="STRICT_PACK",
            _soft_target_node_id=node,
            bundle_label_selector=[dict(demand.labels)] if demand.labels else None,
        )
        try:
            async with asyncio.timeout(seconds):
                await group.ready()
        except TimeoutError:
            remove_placement_group(group)
            reason = demand.unmet(await asyncio.to_thread(_nodes))
            raise UnavailableError(f"no place for a replica within {seconds:g} s: {reason}") from None
        except asyncio.CancelledError:
            remove_placement_group(group)
            raise
        table = await asyncio.to_thread(placement_group_table, group)
        place = Place(group, table["bundles_to_node_id"][0])
        self._replicas[place.node] += 1
        return place

    def free(self, place: Place) -> None:
        """Gives a place back, and ends whatever runs there."""
        self._replicas[place.node] -= 1
        remove_placement_group(place.group)

    async def serve(
        self,
        place: Place,
        demand: Demand,
        name: str,
        module: str,
        settings: ServiceSettings,
        max_restarts: int,
    ) -> Ended:
        """Runs a service until it ends; one that dies is started again.

        Raises:
            UnavailableError: it died once too often, or its node is gone.
        """
        options = {
            "num_cpus": demand.bundle.get("CPU", 0),
            "num_gpus": demand.bundle.get("GPU", 0),
            "resources": {n: a for n, a in demand.bundle.items() if n not in ("CPU", "GPU")},
            "max_restarts": max_restarts,
            "max_task_retries": max_restarts,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, 0),
        }
        actor = ray.remote(ServiceActor).options(**options).remote(name)
        try:
            ended: Ended = await actor.serve.remote(module, settings)
        except RayError as error:
            raise UnavailableError(f"{name} died: {str(error).splitlines()[0]}") from None
        finally:
            ray.kill(actor)
        return ended

    def _emptiest(self, demand: Demand) -> str | None:
        nodes = [node.id for node in _nodes() if demand.is_met_by(node)]
        return min(nodes, key=self._replicas.__getitem__, default=None)


def _init(address: str | None) -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    own = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES} if address is None else {}
    join = partial(ray.init, address or "local", namespace="specdecode", logging_level=logging.ERROR)
    join(**own)


async def _check_reachable(address: str) -> None:
    host, port = address.rsplit(":", 1)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError) as error:
        reason = str(error) or f"no answer within {_CONNECT_SECONDS:g} s"
        raise UnavailableError(f"ray_address {address}: no Ray cluster there: {reason}") from None
    writer.close()


def _nodes() -> list[Node]:
    return [
        Node(node["NodeID"], node["Resources"], node.get("Labels", {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
