"""Proof at start that a model on paged attention computes what its own attention computes."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode.errors import FailedPreconditionError
from specdecode.lm.attention import ATTENTION_NAME
from specdecode.lm.model import LoadedModel
from specdecode.lm.runner import Chunk, PagedLM

_BLOCK_SIZE = 4
_LENGTHS = (21, 9)
_SPLITS = (6, 5)
# Largest difference of logits over the largest logit. Rounding gives 1e-6 in float32 and up to a few percent
# in 16 bits; an ignored feature of the attention (sinks, biases, another window) gives tens of percent.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_TOLERANCE_16_BIT = 0.08


def check_paged_equals_plain(model: LoadedModel, plain_attention: str) -> None:
    """Compares logits of two sequences, run together in two parts each, with the model's own attention.

    Raises:
        FailedPreconditionError: they differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.vocab_size, (length,), generator=generator) for length in _LENGTHS]
    try:
        model.module.set_attn_implementation(plain_attention)
        with torch.inference_mode():
            plain = [
                model.module(input_ids=p[None].to(model.device), use_cache=False).logits[0] for p in prompts
            ]
        model.module.set_attn_implementation(ATTENTION_NAME)
        paged = _run_paged(model, prompts)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise FailedPreconditionError(
            f"{model.name}: paged attention failed its self-test: {error}"
        ) from error
    largest = max(float(logits.abs().max()) for logits in plain)
    difference = max(float((a.float() - b.float()).abs().max()) for a, b in zip(plain, paged, strict=True))
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_16_BIT)
    if not difference <= tolerance * largest:
        raise FailedPreconditionError(
            f"{model.name}: {type(model.module).__name__} on paged attention differs from its own attention "
            f"by {difference:.3g} (logits up to {largest:.3g}, allowed {tolerance * largest:.3g}): its "
            "attention has a feature that the paged one lacks"
        )


def _run_paged(model: LoadedModel, prompts: list[Tensor]) -> list[Tensor]:
    lm = PagedLM(model, num_blocks=16, block_size=_BLOCK_SIZE, prefix_cache=False)
    sequences = [lm.new_sequence(prompt.tolist()) for prompt in prompts]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for first in (True, False):
        chunks = []
        for sequence, split in zip(sequences, _SPLITS, strict=True):
            tokens = sequence.token_ids[:split] if first else sequence.token_ids[split:]
            chunks.append(Chunk(sequence, tokens, len(tokens)))
        rows = torch.split(lm.forward(chunks), [chunk.num_logits for chunk in chunks])
        for part, logits in zip(parts, rows, strict=True):
            part.append(logits)
    return [torch.cat(part) for part in parts]
