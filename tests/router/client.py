"""Requests as a client sends them, and what a plain model would answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdecode.v1 import router_service_pb2 as pb
from specdecode.v1 import types_pb2
from tests.router import tiny

PROMPT = "the quick brown fox"
NGRAM, MODEL = types_pb2.DRAFTER_KIND_NGRAM, types_pb2.DRAFTER_KIND_MODEL


def request_for(prompt: str | Sequence[int] = PROMPT, **sampling: Any) -> Any:
    """A request that wants its rounds told."""
    request = pb.GenerateRequest(sampling=pb.SamplingOptions(**sampling), include_rounds=True)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def speculating(request: Any, num_draft_tokens: int, drafter: int) -> Any:
    """The same with its own drafter and γ, in every round; γ 0 is speculation off."""
    own = pb.GenerateRequest()
    own.CopyFrom(request)
    own.speculation.num_draft_tokens = num_draft_tokens
    own.speculation.drafter = drafter  # type: ignore[assignment]
    on = num_draft_tokens > 0
    own.speculation.mode = pb.SPECULATION_MODE_ON if on else pb.SPECULATION_MODE_OFF
    return own


@cache
def _plain_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def greedy(path: Path, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers generates in float32."""
    return list(_greedy(path, tuple(prompt), max_tokens))


@cache
def _greedy(path: Path, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = _plain_model(path).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=tiny.EOS,
        pad_token_id=tiny.EOS,
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@torch.inference_mode()
def logprobs(path: Path, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab_size]: logprobs at the position of each id, from raw logits."""
    logits = _plain_model(path)(torch.tensor([[*prompt, *ids]])).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
