"""What is known of a replica: to itself, to the registry that it announces itself to, and to routers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from specdecode.types import LoadSnapshot, ModelInfo


class ReplicaRole(Enum):
    """What a replica serves."""

    TARGET = "target"
    DRAFT = "draft"


class ReplicaState(Enum):
    """Where a replica is in its life."""

    STARTING = "starting"
    """Waits for a place, or loads its model."""
    CALIBRATING = "calibrating"
    READY = "ready"
    DRAINING = "draining"
    """Finishes what runs, and takes nothing new."""
    DEAD = "dead"


@dataclass(frozen=True)
class Replica:
    """One replica.

    Attributes:
        id: unique in one registry; stays when the replica is started again.
        address: host:port; empty until it listens.
        devices: accelerators that it was given, as CUDA_VISIBLE_DEVICES says it.
        detail: what it waits for, or why it is dead.
    """

    id: str
    role: ReplicaRole
    state: ReplicaState = ReplicaState.STARTING
    address: str = ""
    model: ModelInfo | None = None
    load: LoadSnapshot | None = None
    devices: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Scale:
    """How many replicas are to run; None: as many as now."""

    num_targets: int | None = None
    num_drafts: int | None = None
