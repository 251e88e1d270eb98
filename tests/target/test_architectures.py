"""Whatever is drafted, cached or preempted, greedy output in float32 is transformers' own `generate`."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from target_service.scheduler import SchedulerLimits
from tests.lm.tiny import CONFIGS, plain_model, random_prompt
from tests.target.driver import Client, Drafter, make_engine, opening

NUM_TOKENS = 24
PROMPT_LENGTHS = (1, 15, 16, 17, 200)
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(PROMPT_LENGTHS)]
ROUNDS = [("no", 0), *product(("right", "half right", "wrong", "random"), (1, 3, 8))]


@cache
def generated(name: str) -> list[list[int]]:
    """What `generate` continues each prompt with."""
    model = plain_model(name)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    texts = [model.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in PROMPTS]
    return [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts, strict=True)]


def open_all(client: Client, first: int = 0) -> list[int]:
    """Opens every prompt, numbered from `first` on."""
    client.send(*(opening(first + i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)))
    return list(range(first, first + len(PROMPTS)))


def outputs(client: Client, first: int = 0) -> list[list[int]]:
    return [client.tokens(first + i) for i in range(len(PROMPTS))]


@pytest.mark.parametrize(("kind", "num_draft_tokens"), ROUNDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_output_is_that_of_generate(name: str, kind: str, num_draft_tokens: int) -> None:
    client = Client(make_engine(name))
    drafter = Drafter(client, dict(enumerate(generated(name))), kind)
    open_all(client)
    client.run(lambda sequence: drafter.verify(sequence, num_draft_tokens))
    assert outputs(client) == generated(name)
    accepted = sum(result.num_accepted for results in client.results.values() for result in results)
    if kind != "random":
        assert (accepted == 0) == (kind in ("no", "wrong"))


@pytest.mark.parametrize("name", CONFIGS)
def test_leases_give_the_output_of_generate(name: str) -> None:
    client = Client(make_engine(name))
    open_all(client)
    client.run(lambda sequence: client.lease(sequence, 5))
    assert outputs(client) == generated(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_prefix_hits_do_not_change_the_output(name: str) -> None:
    client = Client(make_engine(name))
    drafter = Drafter(client, dict(enumerate(2 * generated(name))), "half right")
    for first in (0, len(PROMPTS)):
        open_all(client, first)
        client.run(drafter.any_order)
    assert outputs(client) == outputs(client, len(PROMPTS)) == generated(name)
    cached = [client.results[sequence][0].num_cached_tokens for sequence in range(2 * len(PROMPTS))]
    assert cached == [0, 0, 0, 0, 0, 0, 0, 0, 16, 192]


@pytest.mark.parametrize("name", CONFIGS)
def test_preemption_does_not_change_the_output(name: str) -> None:
    client = Client(make_engine(name, num_blocks=22))
    drafter = Drafter(client, dict(enumerate(generated(name))), "half right")
    open_all(client)
    client.run(drafter.any_order)
    assert outputs(client) == generated(name)
    assert sum(client.last(sequence).num_preemptions for sequence in range(len(PROMPTS))) > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tiny_budget_does_not_change_the_output(name: str) -> None:
    limits = SchedulerLimits(max_running=4, max_tokens_in_flight=33, prefill_chunk=7)
    client = Client(make_engine(name, limits=limits))
    drafter = Drafter(client, dict(enumerate(generated(name))), "random")
    open_all(client)
    client.run(drafter.any_order)
    assert outputs(client) == generated(name)
