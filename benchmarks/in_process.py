"""The target's engine without its service: no gRPC, no router, no thread."""

from __future__ import annotations

import argparse

from specdecode.config import TargetSettings
from specdecode.types import DecodeFrame, Lease, Method, OpenSequence, SamplingParams
from target_service.__main__ import build_replica
from target_service.engine import Engine

NUM_BLOCKS = 2048
"""KV blocks, in process and in the service: 64 sequences of 512 tokens."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of the model can be told."""
    parser.add_argument("--model", default="smollm2-135m-instruct", help="fetched name, directory or hub id")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="threads of a forward on the CPU (default: 2)")


def build_engine(model: str, device: str, dtype: str, threads: int) -> Engine:
    """An engine as `python -m target_service` would build it."""
    settings = TargetSettings.model_validate(
        {
            "model": model,
            "device": device,
            "dtype": dtype,
            "num_threads": threads,
            "num_blocks": NUM_BLOCKS,
        }
    )
    return build_replica(settings).engine


def open_order(
    sequence: int, token_ids: tuple[int, ...], sampling: SamplingParams, salt: bytes, num_output: int = 0
) -> OpenSequence:
    """A greedy sequence; the last `num_output` of the tokens are output."""
    return OpenSequence(
        sequence=sequence,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) - num_output,
        sampling=sampling,
        method=Method.GREEDY,
        cache_salt=salt,
    )


def lease_frame(opens: list[OpenSequence], num_tokens: int) -> DecodeFrame:
    """Opens sequences that may run to their end on their own."""
    leases = tuple(Lease(opened.sequence, len(opened.token_ids), num_tokens) for opened in opens)
    return DecodeFrame(opens=tuple(opens), leases=leases)
