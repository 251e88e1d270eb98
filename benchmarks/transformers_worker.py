"""Worker: transformers' own `generate`, greedy, one padded batch, no compilation."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.in_process import add_model_options
from benchmarks.jobs import Answer, Job, serve
from specdecode import models


def padded(job: Job, pad: int) -> tuple[Tensor, Tensor]:
    """([B, L] ids, [B, L] mask), padded on the left."""
    longest = max(len(prompt.token_ids) for prompt in job.prompts)
    ids = torch.full((len(job.prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(job.prompts):
        ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        mask[row, longest - len(prompt.token_ids) :] = 1
    return ids, mask


def run(model: Any, job: Job) -> Answer:
    """Runs one job to its end."""
    began = time.perf_counter()
    ids, mask = padded(job, pad=model.generation_config.pad_token_id or 0)
    output = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        max_new_tokens=job.max_tokens,
    )
    token_ids = output[:, ids.shape[1] :].tolist()
    return Answer(time.perf_counter() - began, token_ids)


def main() -> None:
    """Loads the model and serves jobs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transformers_worker", description=__doc__)
    add_model_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = models.resolve(options.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=options.dtype).eval().to(options.device)
    # Every text runs to max_tokens, as ignore_eos makes it elsewhere.
    pad = model.generation_config.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0 if pad is None else pad)
    serve(lambda job: run(model, job))


if __name__ == "__main__":
    main()
