"""The real model's tokens under sampled verification, against the exact distribution.

20,480 samples per method go through the real drafter, engine, scheduler and verification.
"""

from __future__ import annotations

import pytest
import torch

from specdecode.lm.model import load_model
from specdecode.models import resolve
from specdecode.tokenizer import load_tokenizer
from specdecode.types import Method, SamplingParams
from tests.exactness.continuations import NUM_DRAFTED, RememberingLM, Tokens, exact, p_values, sampled

NUM_SAMPLES = 20_480
VOCAB_SIZE = 8192
"""Ids above are cut off both models: less to sort for each of 60,000 rows, nothing else changes."""
SAMPLING = SamplingParams(temperature=1.3, top_k=8)


@pytest.fixture(scope="module")
def prompt() -> Tokens:
    ids = tuple(
        load_tokenizer(resolve("smollm2-135m-instruct"))("The best thing about the city is").input_ids
    )
    assert max(ids) < VOCAB_SIZE
    return ids


@pytest.fixture(scope="module")
def target() -> RememberingLM:
    model = load_model(resolve("smollm2-135m-instruct"), torch.float32)
    return RememberingLM(model.limited(vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def draft() -> RememberingLM:
    model = load_model(resolve("smollm2-135m-instruct-draft"), torch.float32)
    return RememberingLM(model.limited(vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
def test_tokens_have_the_exact_distribution(
    method: Method, prompt: Tokens, target: RememberingLM, draft: RememberingLM
) -> None:
    samples, num_accepted = sampled(target, draft, prompt, SAMPLING, method, NUM_SAMPLES)
    expected = exact(target, prompt, SAMPLING)
    for position in (1, 2):
        assert len({path[position] for path in expected}) > SAMPLING.top_k
    assert 0 < num_accepted < NUM_DRAFTED * NUM_SAMPLES
    assert min(p_values(samples, expected)) >= 1e-4
