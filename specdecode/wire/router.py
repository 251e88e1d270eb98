"""What the router tells clients of a request (`router_service.proto`); requests are its own to read."""

from __future__ import annotations

from specdecode.types import (
    RoundRecord,
    Usage,
)
from specdecode.v1 import router_service_pb2 as pb
from specdecode.wire.parts import (
    DRAFTERS,
    ORIGINS,
    step_times_from_proto,
    step_times_to_proto,
)

_USAGE_FIELDS = tuple(field.name for field in pb.Usage.DESCRIPTOR.fields)


def usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(**{name: getattr(usage, name) for name in _USAGE_FIELDS})


def usage_from_proto(message: pb.Usage) -> Usage:
    return Usage(**{name: getattr(message, name) for name in _USAGE_FIELDS})


def round_record_to_proto(record: RoundRecord) -> pb.RoundRecord:
    return pb.RoundRecord(
        index=record.index,
        num_drafted=record.num_drafted,
        num_accepted=record.num_accepted,
        num_emitted=record.num_emitted,
        last_origin=ORIGINS.to_proto(record.last_origin),
        drafter=DRAFTERS.to_proto(record.drafter),
        reason=record.reason,
        round_seconds=record.seconds,
        draft_seconds=record.draft_seconds,
        times=step_times_to_proto(record.times),
    )


def round_record_from_proto(message: pb.RoundRecord) -> RoundRecord:
    return RoundRecord(
        index=message.index,
        num_drafted=message.num_drafted,
        num_accepted=message.num_accepted,
        num_emitted=message.num_emitted,
        last_origin=ORIGINS.from_proto(message.last_origin, "last_origin"),
        drafter=DRAFTERS.optional_from_proto(message.drafter, "drafter"),
        reason=message.reason,
        seconds=message.round_seconds,
        draft_seconds=message.draft_seconds,
        times=step_times_from_proto(message.times),
    )
