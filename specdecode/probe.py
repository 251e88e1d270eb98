"""`python -m specdecode.probe [ADDRESS]`: exit code 0 if the service at ADDRESS can answer requests.

For health checks of containers; Kubernetes asks by itself. ADDRESS is host:port, by default that of
SPECDECODE_PROBE, else a router's on this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROBE_VARIABLE = "SPECDECODE_PROBE"

DEFAULT_ADDRESS = "127.0.0.1:50051"
_SECONDS = 4.0


def probe(address: str, seconds: float = _SECONDS) -> str:
    """Why the service at host:port can't answer requests; empty if it can."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError as error:
            return f"{address}: {error.details()}"
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "" if serving else f"{address}: not serving"


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    address = argv[0] if argv else os.environ.get(PROBE_VARIABLE) or DEFAULT_ADDRESS
    reason = probe(address)
    if reason:
        print(reason, file=sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
