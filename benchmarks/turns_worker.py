"""Worker: one round's part after another, a draft's or its verification's, each when it is asked for."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.in_process import add_model_options, build_engine, lease_frame, open_order
from draft_service.drafting import SequenceKey
from draft_service.model import DraftLimits, ModelDrafter
from specdecode.lm.model import load_model
from specdecode.lm.runner import PagedLM
from specdecode.models import resolve
from specdecode.types import (
    DecodeFrame,
    DrafterKind,
    Method,
    OpenDraft,
    Propose,
    SamplingParams,
    Verify,
)

PROMPT_TOKENS = 100
LONGEST = 400
"""A text that is longer is given up for a new one."""
NUM_BLOCKS = 512
_GREEDY = SamplingParams(temperature=0.0, max_tokens=2 * LONGEST)

Part = Callable[[int], float]
"""Takes γ; seconds."""


def verification(model: str, device: str, dtype: str, threads: int) -> Part:
    """Rounds of one sequence whose drafts are random tokens; γ 0 is a plain step."""
    engine = build_engine(model, device, dtype, threads)
    drawn = random.Random(1)
    number, length = 0, LONGEST + 1

    def steps() -> None:
        nonlocal length
        while not (results := engine.step().results):
            pass
        for _, result in results:
            if result.error is not None:
                raise result.error
            length = result.committed_length

    def run(num_draft_tokens: int) -> float:
        nonlocal number, length
        if length > LONGEST:
            prompt = tuple(drawn.randrange(100, 8000) for _ in range(PROMPT_TOKENS))
            engine.apply(1, DecodeFrame(closes=(number,)))
            number += 1
            engine.apply(1, lease_frame([open_order(number, prompt, _GREEDY, str(number).encode())], 1))
            steps()
        drafted = tuple(drawn.randrange(100, 8000) for _ in range(num_draft_tokens))
        began = time.perf_counter()
        engine.apply(1, DecodeFrame(verifies=(Verify(number, length, drafted),)))
        steps()
        return time.perf_counter() - began

    return run


def drafting(model: str, device: str, dtype: str, threads: int) -> Part:
    """Drafts for one sequence, each after a rejection of the first draft of the last."""
    torch.set_num_threads(threads)
    lm = PagedLM(load_model(resolve(model), getattr(torch, dtype), device), NUM_BLOCKS)
    drafter = ModelDrafter(lm, DraftLimits(), torch.Generator().manual_seed(1))
    drawn = random.Random(1)
    number, sequence = 0, None

    def finish() -> None:
        while drafter.busy:
            drafter.advance()

    def run(num_draft_tokens: int) -> float:
        nonlocal number, sequence
        if sequence is None or sequence.committed_length > LONGEST:
            if sequence is not None:
                sequence.close()
            number += 1
            prompt = tuple(drawn.randrange(100, 8000) for _ in range(PROMPT_TOKENS))
            order = OpenDraft(number, prompt, len(prompt), _GREEDY, Method.GREEDY, DrafterKind.MODEL)
            sequence = drafter.open(SequenceKey(1, number), order)
            finish()
        began = time.perf_counter()
        committed = (drawn.randrange(100, 8000),)
        sequence.propose(Propose(number, sequence.committed_length, committed, num_draft_tokens))
        finish()
        return time.perf_counter() - began

    return run


def main() -> None:
    """Loads the model and answers each γ on stdin with seconds; says "ready" first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns_worker", description=__doc__)
    parser.add_argument("part", choices=("draft", "target"))
    add_model_options(parser)
    o = parser.parse_args()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    part = drafting if o.part == "draft" else verification
    run = part(o.model, o.device, o.dtype, o.threads)
    replies.write('"ready"\n')
    for line in sys.stdin:
        replies.write(json.dumps(run(int(line))) + "\n")


if __name__ == "__main__":
    main()
