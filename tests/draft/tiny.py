"""A tiny random Llama, plain and paged, and the plain one's answers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draft_service.drafting import Answer
from draft_service.model import DraftLimits, ModelDrafter
from specdecode.lm.model import LoadedModel, adopt_model
from specdecode.lm.runner import PagedLM
from specdecode.types import DrafterKind, Method, OpenDraft, SamplingParams

VOCAB_SIZE = 61
MAX_LENGTH = 256
GREEDY = SamplingParams(temperature=0.0)


@cache
def plain_model() -> Any:
    """Float32; weights large enough that greedy picks are far from ties, small enough for 1e-5 on KV."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(5)
    return LlamaForCausalLM(config).float().eval().requires_grad_(False)


@cache
def paged_model() -> LoadedModel:
    """The same weights on paged attention."""
    return adopt_model(copy.deepcopy(plain_model()), "tiny")


@cache
def reduced_model(token_ids: tuple[int, ...]) -> LoadedModel:
    """The same weights with a head of these ids."""
    return adopt_model(copy.deepcopy(plain_model()), "tiny", draft_vocabulary=torch.tensor(token_ids))


def new_drafter(
    num_blocks: int = 256,
    block_size: int = 4,
    max_length: int | None = None,
    limits: DraftLimits | None = None,
    model: LoadedModel | None = None,
) -> ModelDrafter:
    """A drafter with a pool of its own."""
    lm = PagedLM((model or paged_model()).limited(max_length=max_length), num_blocks, block_size)
    return ModelDrafter(lm, limits or DraftLimits(), torch.Generator().manual_seed(11))


def open_draft(
    sequence: int,
    token_ids: Sequence[int],
    method: Method = Method.GREEDY,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    choice_index: int = 0,
    drafter: DrafterKind = DrafterKind.MODEL,
) -> OpenDraft:
    """An order whose tokens are all prompt."""
    prompt = tuple(token_ids)
    return OpenDraft(sequence, prompt, len(prompt), sampling, method, drafter, seed, choice_index)


def run(drafter: ModelDrafter) -> list[Answer]:
    """All answers, in order; the pool's invariants are proven after every turn."""
    answers = []
    for _ in range(1_000):
        if not drafter.busy:
            return answers
        answers += drafter.advance()
        check_integrity(drafter)
    raise AssertionError("the drafter makes no progress")


def check_integrity(drafter: ModelDrafter) -> None:
    """No block lost or owned twice, and everyone who holds blocks can be made to give them up."""
    drafter.lm.pool.check_integrity(sequence.kv.block_table for sequence in drafter._resident.values())


def plain_logits(token_ids: Sequence[int]) -> Tensor:
    """[len(token_ids), V] by transformers alone."""
    with torch.inference_mode():
        logits: Tensor = plain_model()(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits


def greedy_continuation(token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """By transformers' own `generate`."""
    if num_tokens == 0:
        return ()
    prompt = torch.tensor([list(token_ids)])
    mask = torch.ones_like(prompt)
    output = plain_model().generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)
    return tuple(output[0, len(token_ids) :].tolist())
