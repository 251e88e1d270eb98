"""What a benchmark asks of a worker process, one JSON line each way.

Everything that is measured runs in a process of its own and waits on its stdin while it is not its turn, so
that several can be measured in turn on one machine without loading their models again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from specdecode.types import LoadSnapshot


@dataclass(frozen=True)
class JobPrompt:
    """A prompt as a user writes it, and as the model reads it."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """Generate `max_tokens` tokens for each prompt, all at once, whatever ends a text.

    Attributes:
        salt: keeps the prefix cache from knowing prompts of earlier jobs.
        num_draft_tokens: γ; 0 is speculation off. Only the services speculate.
        auto: let the router decide, whatever `num_draft_tokens` says.
        temperature: above 0 only the services sample, without a seed.
        watch_kv: look at the KV pool while it runs; such a run is not to be timed.
    """

    prompts: tuple[JobPrompt, ...]
    max_tokens: int
    salt: str
    num_draft_tokens: int = 0
    auto: bool = False
    temperature: float = 0.0
    watch_kv: bool = False

    def salt_of(self, index: int) -> bytes:
        """Of one prompt: no two share KV, as transformers' sequences don't."""
        return f"{self.salt}/{index}".encode()


@dataclass(frozen=True)
class Answer:
    """What a worker did.

    Attributes:
        seconds: from the first request's start to the last token.
        token_ids: of each prompt, in order.
        usage: Usage of the services, summed over the prompts.
        kv_waste: KV blocks taken beyond what the tokens fill, a sequence, at the worst moment seen.
        num_held_blocks: KV blocks in use after the job.
    """

    seconds: float
    token_ids: list[list[int]]
    usage: dict[str, int] = field(default_factory=dict)
    kv_waste: float | None = None
    num_held_blocks: int | None = None


def blocks_wasted(load: LoadSnapshot, num_kv_tokens: int, num_sequences: int, block_size: int) -> float:
    """Blocks in use beyond what the KV fills, a sequence."""
    used = load.num_blocks - load.num_free_blocks
    return (used - num_kv_tokens / block_size) / num_sequences


def serve(run: Callable[[Job], Answer]) -> None:
    """Answers jobs from stdin until it ends; says "ready" first."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # Whatever a library prints must not end up among the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    replies.write('"ready"\n')
    for line in sys.stdin:
        replies.write(json.dumps(asdict(run(job_from_json(json.loads(line))))) + "\n")


def job_from_json(content: dict[str, Any]) -> Job:
    """As `dataclasses.asdict` wrote it."""
    prompts = tuple(JobPrompt(p["text"], tuple(p["token_ids"])) for p in content.pop("prompts"))
    return Job(prompts, **content)
