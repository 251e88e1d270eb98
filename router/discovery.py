"""Where replicas are: told by the operator, by a registry that is watched, or by a name of many addresses."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Mapping

import grpc

from specdecode.config import DNS_SCHEME, WATCH_SCHEME
from specdecode.errors import SpecdecodeError
from specdecode.replicas import Replica, ReplicaRole, ReplicaState
from specdecode.serving import connect, pause
from specdecode.tls import ClientTls
from specdecode.v1 import replica_service_pb2 as pb
from specdecode.v1 import replica_service_pb2_grpc as pb_grpc
from specdecode.wire import replicas_from_proto

logger = logging.getLogger(__name__)

_DNS_SECONDS = 5.0
"""How often a name is resolved: it does not say when it changes."""
_PAUSE_SECONDS = 0.5

Sightings = Mapping[str, ReplicaState]
"""State of each replica by its address; who is not in it is not there any more."""


def follow(
    source: str, role: ReplicaRole, max_message_bytes: int, tls: ClientTls | None = None
) -> AsyncIterator[Sightings]:
    """What a source tells of replicas, now and whenever it changes; one host:port never does.

    Args:
        source: host:port; `dns:///name:port`, all addresses of a name; `watch://host:port`, a registry.
        role: of the replicas that are meant, where the source knows it.
        tls: how a registry is called.
    """
    if source.startswith(WATCH_SCHEME):
        return _watched(source.removeprefix(WATCH_SCHEME), role, max_message_bytes, tls)
    if source.startswith(DNS_SCHEME):
        return _resolved(source.removeprefix(DNS_SCHEME))
    return _told(source)


async def _told(address: str) -> AsyncIterator[Sightings]:
    yield {address: ReplicaState.READY}


async def _resolved(name: str) -> AsyncIterator[Sightings]:
    """All addresses of a name; while it can't be resolved, those known last stay."""
    told: Sightings | None = None
    while True:
        try:
            found: Sightings | None = await _addresses(name)
        except OSError as error:
            logger.log(logging.DEBUG if told is None else logging.WARNING, "%s: %s", name, error.strerror)
            found = told
        if found is not None and found != told:
            told = found
            yield found
        await asyncio.sleep(_DNS_SECONDS)


async def _addresses(name: str) -> Sightings:
    host, port = name.rsplit(":", 1)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return {f"[{h}]:{port}" if ":" in h else f"{h}:{port}": ReplicaState.READY for h in hosts}


async def _watched(
    address: str, role: ReplicaRole, max_message_bytes: int, tls: ClientTls | None
) -> AsyncIterator[Sightings]:
    """What a registry tells; while it is away, what it told last stays."""
    told = ""
    while True:
        try:
            async with connect(address, max_message_bytes, tls) as channel:
                call = pb_grpc.ReplicaServiceStub(channel).WatchReplicas(pb.WatchReplicasRequest())
                async for message in call:
                    told = ""
                    yield _sightings(replicas_from_proto(message), role)
            problem = "it ended"
        except grpc.aio.AioRpcError as error:
            problem = error.details() or error.code().name
        except SpecdecodeError as error:
            problem = f"it sent what can't be read: {error.message}"
        level = logging.DEBUG if problem == told else logging.WARNING
        logger.log(level, "registry %s: %s; watching again", address, problem)
        told = problem
        await pause(_PAUSE_SECONDS)


def _sightings(replicas: tuple[Replica, ...], role: ReplicaRole) -> Sightings:
    return {
        replica.address: replica.state for replica in replicas if replica.role is role and replica.address
    }
