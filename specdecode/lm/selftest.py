"""Proof at start that a model on paged attention computes what its own attention computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdecode.errors import FailedPreconditionError
from specdecode.lm.model import LoadedModel
from specdecode.lm.runner import Chunk, PagedLM

_BLOCK_SIZE = 4
_LENGTHS = (21, 9)
_SPLITS = (6, 5)
# Largest difference of logits over the largest logit. Rounding gives 1e-6 in float32 and up to a few percent
# in 16 bits; an ignored feature of the attention (sinks, biases, another window) gives tens of percent.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_TOLERANCE_16_BIT = 0.08


@dataclass(frozen=True)
class PlainLogits:
    """What the model's own attention computes for two sequences.

    Attributes:
        prompts: [n] token ids of each.
        logits: [n, vocab_size] of each.
    """

    prompts: list[Tensor]
    logits: list[Tensor]

    @classmethod
    def of(cls, module: Any, attention: str, vocab_size: int, name: str) -> PlainLogits:
        """Runs a module that nothing was done to yet on `attention`.

        Raises:
            FailedPreconditionError: it can't be run.
        """
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(vocab_size, (length,), generator=generator) for length in _LENGTHS]
        try:
            module.set_attn_implementation(attention)
            with torch.inference_mode():
                outputs = [module(input_ids=p[None].to(module.device), use_cache=False) for p in prompts]
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise FailedPreconditionError(f"{name}: can't be run: {error}") from error
        return cls(prompts, [output.logits[0] for output in outputs])


def check_paged_equals_plain(model: LoadedModel, plain: PlainLogits) -> None:
    """Compares the two sequences' logits, run together in two parts each.

    Raises:
        FailedPreconditionError: they differ by more than rounding.
    """
    try:
        paged = _run_paged(model, plain.prompts)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise FailedPreconditionError(
            f"{model.name}: paged attention failed its self-test: {error}"
        ) from error
    largest = max(float(logits.abs().max()) for logits in plain.logits)
    pairs = zip(plain.logits, paged, strict=True)
    difference = max(_difference(a, b, model.draft_vocabulary) for a, b in pairs)
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_16_BIT)
    if not difference <= tolerance * largest:
        raise FailedPreconditionError(
            f"{model.name}: {type(model.module).__name__} on paged attention differs from its own attention "
            f"by {difference:.3g} (logits up to {largest:.3g}, allowed {tolerance * largest:.3g}): its "
            "attention has a feature that the paged one lacks"
        )


def _difference(
    plain: Tensor,  # [n, vocab_size]
    paged: Tensor,  # [n, vocab_size]
    draft_vocabulary: Tensor | None,  # [K] int64
) -> float:
    """The largest; with a draft vocabulary that of its ids, infinite if any other has a logit above −∞."""
    if draft_vocabulary is not None:
        if bool((paged.index_fill(1, draft_vocabulary, -torch.inf) > -torch.inf).any()):
            return torch.inf
        plain, paged = plain[:, draft_vocabulary], paged[:, draft_vocabulary]
    return float((plain.float() - paged.float()).abs().max())


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
