"""A chat by gRPC: the text as it comes, then what speculation did for it."""

from __future__ import annotations

import sys

from specdecode.client import Completion
from specdecode.requests import ChatMessage, ChatPrompt, GenerateRequest, SamplingOptions
from specdecode.retries import Retries
from specdecode.sync_client import SyncRouterClient


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    request = GenerateRequest(
        ChatPrompt((ChatMessage("user", "Why is the sky blue?"),)),
        SamplingOptions(max_tokens=64, temperature=0.7, seed=7),
    )
    completion = Completion(0)
    with SyncRouterClient.open(address, retries=Retries()) as client:
        for piece in client.generate(request, timeout_seconds=120):
            print(piece.text, end="", flush=True)
            completion.add(piece)
    usage = completion.usage
    print(f"\n{usage.num_emitted} tokens in {usage.num_rounds} rounds; {usage.num_accepted} were drafted")


if __name__ == "__main__":
    main()
