"""Worker: the target's engine called in process, driven by leases."""

from __future__ import annotations

import argparse
import time

from benchmarks.in_process import add_model_options, build_engine, lease_frame, open_order
from benchmarks.jobs import Answer, Job, blocks_wasted, serve
from specdecode.types import SamplingParams
from target_service.engine import Engine


def run(engine: Engine, job: Job) -> Answer:
    """Runs one job to its end."""
    sampling = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
    token_ids: list[list[int]] = [[] for _ in job.prompts]
    waste = 0.0
    began = time.perf_counter()
    opens = [
        open_order(index, prompt.token_ids, sampling, job.salt_of(index))
        for index, prompt in enumerate(job.prompts)
    ]
    engine.apply(0, lease_frame(opens, job.max_tokens))
    while engine.sequences:
        for key, result in engine.step().results:
            if result.error is not None:
                raise result.error
            token_ids[key.sequence] += result.token_ids
        if job.watch_kv:
            waste = max(waste, _waste(engine))
    seconds = time.perf_counter() - began
    held = engine.load.num_blocks - engine.load.num_free_blocks
    return Answer(seconds, token_ids, kv_waste=waste if job.watch_kv else None, num_held_blocks=held)


def _waste(engine: Engine) -> float:
    sequences = [sequence.kv for sequence in engine.sequences.values() if sequence.kv.block_table]
    if not sequences:
        return 0.0
    num_tokens = sum(sequence.kv_len for sequence in sequences)
    return blocks_wasted(engine.load, num_tokens, len(sequences), engine.lm.pool.block_size)


def main() -> None:
    """Loads the model and serves jobs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_worker", description=__doc__)
    add_model_options(parser)
    options = parser.parse_args()
    engine = build_engine(options.model, options.device, options.dtype, options.threads)
    serve(lambda job: run(engine, job))


if __name__ == "__main__":
    main()
