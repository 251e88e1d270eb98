"""`specdecode scale`: how many replicas a fleet is to have, and those that it has."""

from __future__ import annotations

import asyncio
from typing import Annotated

import grpc
import typer

from specdecode.cli import show
from specdecode.cli.flags import TlsFlags, refused
from specdecode.client import MAX_MESSAGE_BYTES, STATUS_SECONDS
from specdecode.config import TARGET_PORT
from specdecode.replicas import Replica, ReplicaRole, Scale
from specdecode.serving import connect, error_from_rpc
from specdecode.tls import ClientTls
from specdecode.v1 import replica_service_pb2 as pb
from specdecode.v1 import replica_service_pb2_grpc as pb_grpc
from specdecode.wire import replicas_from_proto, scale_to_proto

_MAX_REPLICAS = 4096
_ALLOWED = f"target=N or draft=N, 0 to {_MAX_REPLICAS}"


def scale(
    tls: TlsFlags,
    wanted: Annotated[
        list[str] | None,
        typer.Argument(help=f"How many replicas; {_ALLOWED}", metavar="[ROLE=N]...", show_default=False),
    ] = None,
    registry: Annotated[
        str, typer.Option(help="Registry of the replicas: where the fleet listens", metavar="HOST:PORT")
    ] = f"127.0.0.1:{TARGET_PORT}",
) -> None:
    """Set how many replicas run, and show them.

    New ones are placed by Ray; of those that are too many the newest finish what they run, and end. Without
    ROLE=N nothing is changed.
    """
    replicas = asyncio.run(_scale(registry, tls.tls, _read(wanted or [])))
    shown = show.table(("replica", "left"), ("state", "left"), ("address", "left"), ("running", "right"))
    for replica in replicas:
        state = replica.state.value + (f": {replica.detail}" if replica.detail else "")
        running = "" if replica.load is None else str(replica.load.num_running)
        shown.add_row(replica.id, state, replica.address, running)
    show.OUT.print(shown)


def _read(wanted: list[str]) -> Scale | None:
    """What is asked for; None: nothing."""
    numbers: dict[str, int] = {}
    for text in wanted:
        role, equals, number = text.partition("=")
        is_known = role in (ReplicaRole.TARGET.value, ReplicaRole.DRAFT.value)
        if not (is_known and equals and number.isdecimal() and int(number) <= _MAX_REPLICAS):
            raise refused(text, _ALLOWED)
        numbers[role] = int(number)
    return Scale(numbers.get("target"), numbers.get("draft")) if numbers else None


async def _scale(address: str, tls: ClientTls | None, wanted: Scale | None) -> tuple[Replica, ...]:
    async with connect(address, MAX_MESSAGE_BYTES, tls) as channel:
        stub = pb_grpc.ReplicaServiceStub(channel)
        try:
            if wanted is not None:
                await stub.ScaleReplicas(scale_to_proto(wanted), timeout=STATUS_SECONDS)
            watch = stub.WatchReplicas(pb.WatchReplicasRequest(), timeout=STATUS_SECONDS)
            return replicas_from_proto(await watch.read())
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
