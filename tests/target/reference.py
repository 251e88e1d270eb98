"""One token at a time, each from a whole forward pass in float64, with the transforms spelled out."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdecode.sampling import exponential_noise
from specdecode.types import Method, OpenSequence, SamplingParams
from tests.lm.tiny import plain_model

Row = npt.NDArray[np.float64]


@cache
def _float64_model(name: str) -> Any:
    return deepcopy(plain_model(name)).double()


@torch.inference_mode()
def raw_logits(name: str, token_ids: list[int]) -> Row:
    """[len(token_ids), vocab_size] before any transform."""
    logits = _float64_model(name)(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return np.asarray(logits.numpy(), dtype=np.float64)


def continuation(name: str, opened: OpenSequence) -> list[int]:
    """What greedy or coupled decoding must emit."""
    params, prompt_length = opened.sampling, opened.num_prompt_tokens
    text = list(opened.token_ids)
    while len(text) - prompt_length < params.max_tokens:
        p = probabilities(raw_logits(name, text)[-1], params, text, prompt_length)
        text.append(_pick(p, opened, len(text)))
        if text[-1] in params.stop_token_ids:
            break
    return text[len(opened.token_ids) :]


def probabilities(logits: Row, params: SamplingParams, text: list[int], prompt_length: int) -> Row:
    """p after all transforms, [vocab_size]."""
    logits = logits.copy()
    output = text[prompt_length:]
    for token in set(text):
        positive = logits[token] > 0
        logits[token] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias
    banned = set(params.banned_token_ids)
    if params.allowed_token_ids is not None:
        banned |= set(range(len(logits))) - set(params.allowed_token_ids)
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids)
    logits[sorted(banned)] = -np.inf
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return np.eye(len(logits))[order[0]]
    kept = order[: params.top_k or None]
    masses = _softmax(logits[kept] / params.temperature)
    before = np.cumsum(masses) - masses
    final = (before < params.top_p) & (masses >= params.min_p * masses[0])
    p = np.zeros_like(logits)
    p[np.array(kept)[final]] = masses[final] / masses[final].sum()
    return p


def _softmax(logits: Row) -> Row:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _pick(p: Row, opened: OpenSequence, position: int) -> int:
    if opened.method is Method.GREEDY or p.max() == 1.0:
        return int(p.argmax())
    tokens = np.flatnonzero(p)
    noise = exponential_noise(opened.seed, opened.choice_index, position, torch.from_numpy(tokens)).numpy()
    return int(tokens[(noise / p[tokens]).argmin()])
