"""Replicas as they announce themselves and as routers watch them (`replica_service.proto`)."""

from __future__ import annotations

from collections.abc import Iterable

from specdecode.replicas import Replica, ReplicaRole, ReplicaState, Scale
from specdecode.v1 import replica_service_pb2 as pb
from specdecode.wire.parts import (
    EnumCodec,
    load_snapshot_from_proto,
    load_snapshot_to_proto,
    model_info_from_proto,
    model_info_to_proto,
    refuse,
)

ROLES = EnumCodec(ReplicaRole, pb.ReplicaRole, "REPLICA_ROLE")
STATES = EnumCodec(ReplicaState, pb.ReplicaState, "REPLICA_STATE")


def replica_to_proto(replica: Replica) -> pb.Replica:
    return pb.Replica(
        id=replica.id,
        role=ROLES.to_proto(replica.role),
        state=STATES.to_proto(replica.state),
        address=replica.address,
        model=None if replica.model is None else model_info_to_proto(replica.model),
        load=None if replica.load is None else load_snapshot_to_proto(replica.load),
        devices=replica.devices,
        detail=replica.detail,
    )


def replica_from_proto(message: pb.Replica, field: str = "replica") -> Replica:
    if not message.id:
        raise refuse(f"{field}.id", "is empty")
    return Replica(
        id=message.id,
        role=ROLES.from_proto(message.role, f"{field}.role"),
        state=STATES.from_proto(message.state, f"{field}.state"),
        address=message.address,
        model=model_info_from_proto(message.model) if message.HasField("model") else None,
        load=load_snapshot_from_proto(message.load) if message.HasField("load") else None,
        devices=message.devices,
        detail=message.detail,
    )


def replicas_to_proto(replicas: Iterable[Replica]) -> pb.WatchReplicasResponse:
    return pb.WatchReplicasResponse(replicas=map(replica_to_proto, replicas))


def replicas_from_proto(message: pb.WatchReplicasResponse) -> tuple[Replica, ...]:
    found = enumerate(message.replicas)
    return tuple(replica_from_proto(replica, f"replicas[{index}]") for index, replica in found)


def scale_to_proto(scale: Scale) -> pb.ScaleReplicasRequest:
    return pb.ScaleReplicasRequest(num_targets=scale.num_targets, num_drafts=scale.num_drafts)


def scale_from_proto(message: pb.ScaleReplicasRequest) -> Scale:
    return Scale(
        num_targets=message.num_targets if message.HasField("num_targets") else None,
        num_drafts=message.num_drafts if message.HasField("num_drafts") else None,
    )
