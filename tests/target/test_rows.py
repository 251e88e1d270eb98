"""Every verified row is transformed, picked and reported as if its token had been decoded alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdecode.types import Method, OpenSequence
from tests.lm.tiny import random_prompt
from tests.target.driver import Client, Drafter, make_engine, opening
from tests.target.reference import continuation, raw_logits

NUM_TOKENS = 20
PROMPT = random_prompt(9, seed=3, vocab_size=40)

TRANSFORMS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 2.5},
    "frequency": {"frequency_penalty": 1.5},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    "logit bias": {"logit_bias": ((3, 9.0), (5, 8.5), (11, 9.5))},
    "allowed": {"allowed_token_ids": (2, 3, 5, 7, 11, 13)},
    "banned": {"banned_token_ids": tuple(range(0, 200, 2))},
    "penalised among the allowed": {"allowed_token_ids": (2, 3, 5), "frequency_penalty": 3.0},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.4},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.5},
    "min-p": {"min_p": 0.5},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2, "frequency_penalty": 0.5},
}


def emitted(
    opened: OpenSequence, text: list[int], num_draft_tokens: int, kind: str = "half right"
) -> list[int]:
    client = Client(make_engine())
    client.send(opened)
    drafter = Drafter(client, {opened.sequence: text}, kind)
    client.run(lambda sequence: drafter.verify(sequence, num_draft_tokens))
    return client.tokens(opened.sequence)


def check_every_row(opened: OpenSequence, untransformed: OpenSequence) -> None:
    text = continuation("llama", opened)
    assert text != continuation("llama", untransformed), "the transform changes nothing"
    assert emitted(opened, text, 8, "right") == text
    assert emitted(opened, text, 4) == text
    assert emitted(opened, text, 0) == text


@pytest.mark.parametrize("case", TRANSFORMS)
def test_greedy_rows_are_transformed(case: str) -> None:
    plain = opening(0, PROMPT, max_tokens=NUM_TOKENS)
    check_every_row(opening(0, PROMPT, max_tokens=NUM_TOKENS, **TRANSFORMS[case]), plain)


@pytest.mark.parametrize("case", TRANSFORMS | SAMPLED)
def test_coupled_rows_are_transformed(case: str) -> None:
    plain = opening(0, PROMPT, max_tokens=NUM_TOKENS, temperature=1.0, seed=5)
    options = {"temperature": 1.0, **(TRANSFORMS | SAMPLED)[case]}
    check_every_row(opening(0, PROMPT, max_tokens=NUM_TOKENS, seed=5, **options), plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_wait_for_min_tokens_in_every_row(temperature: float) -> None:
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": temperature, "seed": 5}
    plain = opening(0, PROMPT, **options)
    stops = tuple(continuation("llama", plain)[:12])
    for min_tokens in (3, 7):
        opened = opening(0, PROMPT, stop_token_ids=stops, min_tokens=min_tokens, **options)
        text = continuation("llama", opened)
        assert min_tokens < len(text)
        for num_draft_tokens in (0, 1, 3, 8):
            assert emitted(opened, text, num_draft_tokens, "right") == text


@pytest.mark.parametrize("kind", ["right", "half right", "wrong", "random"])
@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_text_does_not_depend_on_drafts(temperature: float, kind: str) -> None:
    opened = opening(0, PROMPT, max_tokens=NUM_TOKENS, temperature=temperature, seed=2**64 - 3)
    text = continuation("llama", opened)
    for num_draft_tokens in (1, 3, 8):
        assert emitted(opened, text, num_draft_tokens, kind) == text


def test_methods_share_a_step_without_touching_each_other() -> None:
    """With top-k 1 every method must say the same, whatever is drafted; coupled says what its noise says."""
    client = Client(make_engine())
    methods = [Method.REJECTION, Method.COUPLED, Method.BLOCK, Method.GREEDY, Method.REJECTION]
    opens = [
        opening(n, PROMPT[n:], max_tokens=NUM_TOKENS, temperature=1.0, method=method, seed=3)
        for n, method in enumerate(methods)
    ]
    opens = [
        o if o.method is Method.COUPLED else replace(o, sampling=replace(o.sampling, top_k=1)) for o in opens
    ]
    texts = {n: continuation("llama", opened) for n, opened in enumerate(opens)}
    client.send(*opens)
    client.run(Drafter(client, texts).any_order)
    assert {n: client.tokens(n) for n in texts} == texts


def test_seeds_and_choices_have_noise_of_their_own() -> None:
    first = opening(0, PROMPT, max_tokens=NUM_TOKENS, temperature=1.0, seed=1)
    for other in (replace(first, seed=2), replace(first, choice_index=1)):
        assert continuation("llama", other) != continuation("llama", first)
        assert emitted(other, continuation("llama", other), 3) == continuation("llama", other)


def test_a_resumed_sequence_goes_on_as_if_nothing_had_happened() -> None:
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 9}
    options |= {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "min_tokens": 9}
    stops = tuple(continuation("llama", opening(0, PROMPT, **options))[4:12])
    text = continuation("llama", opening(0, PROMPT, stop_token_ids=stops, **options))
    for done in (1, 6):
        opened = opening(0, PROMPT, text[:done], stop_token_ids=stops, **options)
        assert emitted(opened, text[done:], 3) == text[done:]


@pytest.mark.parametrize("method", [Method.GREEDY, Method.COUPLED, Method.REJECTION, Method.BLOCK])
def test_logprobs_are_those_of_their_own_token_in_the_raw_logits(method: Method) -> None:
    temperature = 0.0 if method is Method.GREEDY else 1.3
    options: dict[str, Any] = {
        "method": method,
        "temperature": temperature,
        "frequency_penalty": 1.0,
        "top_k": 4,
    }
    client = Client(make_engine())
    prompts = (PROMPT[4:], PROMPT)
    opens = [
        opening(n, prompt, max_tokens=NUM_TOKENS, logprobs=3, **options) for n, prompt in enumerate(prompts)
    ]
    client.send(*opens)
    drafter = Drafter(
        client, {n: continuation("llama", replace(o, method=Method.GREEDY)) for n, o in enumerate(opens)}
    )
    client.run(lambda sequence: drafter.verify(sequence, 3))
    for sequence, prompt in enumerate(prompts):
        check_logprobs(client, sequence, prompt)


def check_logprobs(client: Client, sequence: int, prompt: list[int]) -> None:
    logits = raw_logits("llama", [*prompt, *client.tokens(sequence)])[len(prompt) - 1 :]
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    reported = [entry for result in client.results[sequence] for entry in result.logprobs]
    assert [entry.token_id for entry in reported] == client.tokens(sequence)
    for row, entry in zip(logprobs, reported, strict=False):
        best = row.argsort()[::-1]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-3)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert [token for token, _ in entry.top] == best[:3].tolist()
        assert [value for _, value in entry.top] == pytest.approx(row[best[:3]].tolist(), abs=1e-3)


def test_no_logprobs_unless_asked_for_and_no_alternatives_for_zero() -> None:
    client = Client(make_engine())
    client.send(opening(0, PROMPT, max_tokens=4), opening(1, PROMPT, max_tokens=4, logprobs=0))
    client.run(lambda sequence: client.verify(sequence, 1, 2))
    assert all(result.logprobs == () for result in client.results[0])
    assert [entry.top for result in client.results[1] for entry in result.logprobs] == [()] * 4
