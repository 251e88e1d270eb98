"""Whole requests through the real engine, scheduler, verification and drafter, on models that are oracles.

Greedy and coupled texts must be one and the same whatever is drafted; sampled texts must have the target's
distribution. Both are checked against rounds of one token at a time, computed here from the oracle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import scipy.stats
import torch

from draft_service.lookup import through_stop
from specdecode.sampling import Window, coupled_tokens, greedy_tokens, probabilities
from specdecode.types import (
    Draft,
    Method,
    SamplingParams,
    SparseDistributions,
)
from target_service.scheduler import SchedulerLimits
from tests.exactness.oracle import Asked, Drafting, Oracle, OracleDrafter, Service, Tokens

LEAST_P_VALUE = 1e-4
TARGET = Oracle(1, vocab_size=7)
DRAFT = Oracle(2, vocab_size=7, like=TARGET, share=0.6)
PENALISED = SamplingParams(
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    logit_bias=((2, 0.7),),
    temperature=1.2,
    top_k=6,
    top_p=0.9,
    min_p=0.02,
)


def window_of(asked: Asked, history: Sequence[int]) -> Window:
    return Window(asked.sampling, list(history), len(asked.prompt))


def logits_after(history: Sequence[int], oracle: Oracle = TARGET) -> torch.Tensor:
    return torch.from_numpy(oracle.logits(history)[None])


def p_after(asked: Asked, history: Sequence[int]) -> torch.Tensor:
    return probabilities(logits_after(history), [window_of(asked, history)])


def pick(asked: Asked, history: Sequence[int]) -> int:
    """The token that a greedy or coupled request must emit after `history`."""
    return _pick(asked, tuple(history))


@cache
def _pick(asked: Asked, history: Tokens) -> int:
    if asked.method is Method.GREEDY:
        return int(greedy_tokens(logits_after(history), [window_of(asked, history)]))
    return int(coupled_tokens(p_after(asked, history), [asked.seed], [asked.choice_index], [len(history)]))


def expected(asked: Asked) -> list[int]:
    """One token at a time, by the definitions."""
    tokens: list[int] = []
    while len(tokens) < asked.sampling.max_tokens:
        tokens.append(pick(asked, [*asked.prompt, *tokens]))
        if tokens[-1] in asked.sampling.stop_token_ids:
            break
    return tokens


def prompts(count: int) -> list[Tokens]:
    """Prompts of 1 to 23 tokens; every third begins like the one before it."""
    rng = np.random.default_rng(3)
    made: list[Tokens] = []
    for number in range(count):
        shared = made[-1] if number % 3 == 2 else ()
        made.append((*shared, *rng.integers(TARGET.vocab_size, size=int(rng.integers(1, 12))).tolist()))
    return made


def picked(method: Method, count: int = 9, **changes: object) -> list[Asked]:
    temperature = 0.0 if method is Method.GREEDY else PENALISED.temperature
    sampling = replace(PENALISED, temperature=temperature, max_tokens=21, **changes)  # type: ignore[arg-type]
    return [
        Asked(prompt, sampling, method, seed=100 + number // 2, choice_index=number % 2)
        for number, prompt in enumerate(prompts(count))
    ]


def guessing(asked: Sequence[Asked], quality: str, num_draft_tokens: int) -> Drafting:
    """Drafts that are the right continuation, right for half of the window, wrong at once, or random."""
    rng = np.random.default_rng(4)

    def draft(number: int, committed: list[int]) -> Draft:
        history, drafted = list(committed), list[int]()
        while len(drafted) < num_draft_tokens:
            right = pick(asked[number], history)
            index, wrong = len(drafted), (right + 1) % TARGET.vocab_size
            match quality:
                case "right":
                    token = right
                case "half right":
                    token = right if index < num_draft_tokens // 2 else wrong
                case "wrong":
                    token = wrong
                case _:
                    token = int(rng.integers(TARGET.vocab_size))
            drafted.append(token)
            history.append(token)
        return Draft(number, len(committed), tuple(drafted))

    return lambda committed: {number: draft(number, token_ids) for number, token_ids in committed.items()}


# Texts that are functions of the target


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
@pytest.mark.parametrize("quality", ["right", "half right", "wrong", "random"])
@pytest.mark.parametrize("method", [Method.GREEDY, Method.COUPLED], ids=lambda method: method.value)
def test_text_does_not_depend_on_drafts(method: Method, quality: str, num_draft_tokens: int) -> None:
    asked = picked(method)
    told = Service(TARGET, num_blocks=128).run(asked, guessing(asked, quality, num_draft_tokens))
    assert [t.token_ids for t in told] == [expected(a) for a in asked]
    results = [result for t in told for result in t.results if result.num_drafted]
    if quality == "right":
        assert all(result.num_accepted == result.num_drafted for result in results)
    if quality == "wrong":
        assert all(result.num_accepted == 0 for result in results)


@pytest.mark.parametrize("method", [Method.GREEDY, Method.COUPLED], ids=lambda method: method.value)
def test_text_does_not_depend_on_leases_preemption_or_chunks(method: Method) -> None:
    asked = picked(method)
    limits = SchedulerLimits(max_tokens_in_flight=40, prefill_chunk=5)
    service = Service(TARGET, num_blocks=24, limits=limits)
    told = service.run(asked, guessing(asked, "half right", 4))
    assert [t.token_ids for t in told] == [expected(a) for a in asked]
    assert any(t.results[-1].num_preemptions for t in told)
    assert service.lm.pool.num_free == 24


@pytest.mark.parametrize("method", [Method.GREEDY, Method.COUPLED], ids=lambda method: method.value)
def test_later_requests_with_the_same_beginnings_get_the_same_text(method: Method) -> None:
    """The prefix cache holds what was committed, and nothing of what was only drafted."""
    asked = picked(method)
    service = Service(TARGET, num_blocks=256)
    first = service.run(asked, guessing(asked, "random", 6))
    continued = [
        replace(a, prompt=(*a.prompt, *t.token_ids, token))
        for a, t in zip(asked, first, strict=True)
        for token in (0, 1)
    ]
    told = service.run(continued, guessing(continued, "wrong", 6))
    assert [t.token_ids for t in told] == [expected(a) for a in continued]
    for a, t in zip(continued, told, strict=True):
        assert t.results[0].num_cached_tokens > len(a.prompt) - 16


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("method", [Method.GREEDY, Method.COUPLED], ids=lambda method: method.value)
def test_a_drafter_that_has_the_targets_model_is_never_wrong(method: Method, num_draft_tokens: int) -> None:
    asked = picked(method)
    told = Service(TARGET, num_blocks=128).run(asked, OracleDrafter(TARGET, asked, num_draft_tokens))
    assert [t.token_ids for t in told] == [expected(a) for a in asked]
    results = [result for t in told for result in t.results if result.num_drafted]
    assert all(result.num_accepted == result.num_drafted for result in results)
    assert all(result.num_drafted == num_draft_tokens for t in told for result in t.results[:-2])


def test_methods_mix_in_one_step() -> None:
    asked = [a for pair in zip(picked(Method.GREEDY), picked(Method.COUPLED), strict=True) for a in pair]
    told = Service(TARGET, num_blocks=256).run(asked, guessing(asked, "half right", 4))
    assert [t.token_ids for t in told] == [expected(a) for a in asked]


# Texts that are samples

SHORT = 3
NUM_SAMPLES = 4_000
TINY_TARGET = Oracle(5, vocab_size=4)
TINY_DRAFT = Oracle(6, vocab_size=4, like=TINY_TARGET, share=0.5)
SAMPLINGS = {
    "plain": SamplingParams(temperature=1.3, max_tokens=SHORT),
    "transformed": replace(PENALISED, top_k=0, top_p=0.8, max_tokens=SHORT),
}


def exact(asked: Asked) -> dict[Tokens, float]:
    """Probability of every text."""
    masses: dict[Tokens, float] = {}
    for text in product(range(TINY_TARGET.vocab_size), repeat=SHORT):
        mass = 1.0
        for index, token in enumerate(text):
            history = [*asked.prompt, *text[:index]]
            row = logits_after(history, TINY_TARGET).double()
            mass *= float(probabilities(row, [window_of(asked, history)])[0, token])
        ended = through_stop(list(text), frozenset(asked.sampling.stop_token_ids))
        masses[tuple(ended)] = masses.get(tuple(ended), 0.0) + mass
    return masses


def p_value(texts: Sequence[Tokens], masses: dict[Tokens, float]) -> float:
    """χ² over texts of at least five expected, the rest in one bin; 0 for a text that can't be."""
    counts = Counter(texts)
    if any(masses[text] < 1e-12 for text in counts):
        return 0.0
    large = [text for text, mass in masses.items() if mass * len(texts) >= 5]
    observed = [counts[text] for text in large]
    means = [masses[text] * len(texts) for text in large]
    rest = len(texts) - sum(means)
    if rest > 1e-6 * len(texts):
        observed.append(len(texts) - sum(observed))
        means.append(rest)
    return float(scipy.stats.chisquare(observed, np.array(means) * (sum(observed) / sum(means))).pvalue)


def sampled_texts(asked: Asked, drafting: str, num_draft_tokens: int) -> list[Tokens]:
    batch = [asked] * 500
    texts: list[Tokens] = []
    rng = np.random.default_rng(8)

    def one_hot(committed: dict[int, list[int]]) -> dict[int, Draft]:
        tokens = {n: tuple(rng.integers(4, size=num_draft_tokens).tolist()) for n in committed}
        return {n: Draft(n, len(committed[n]), tokens[n]) for n in committed}

    service = Service(TINY_TARGET, seed=11, num_blocks=2100)
    for number in range(NUM_SAMPLES // len(batch)):
        drafter: Drafting = one_hot
        if drafting == "model":
            drafter = OracleDrafter(TINY_DRAFT, batch, num_draft_tokens, top_k=3, seed=20 + number)
        texts += [tuple(told.token_ids) for told in service.run(batch, drafter)]
    return texts


@pytest.mark.parametrize("num_draft_tokens", [1, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafting", ["model", "one-hot"])
@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK], ids=lambda method: method.value)
def test_sampled_texts_have_the_targets_distribution(
    method: Method, drafting: str, sampling: str, num_draft_tokens: int
) -> None:
    asked = Asked((1, 0, 2, 1, 3), SAMPLINGS[sampling], method)
    assert p_value(sampled_texts(asked, drafting, num_draft_tokens), exact(asked)) > LEAST_P_VALUE


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK], ids=lambda method: method.value)
def test_drafts_that_come_too_late_leave_the_distribution_as_it_is(method: Method) -> None:
    """If a draft that ended at a stop id were there sooner, dropping late ones would favour the stop id."""
    sampling = replace(SAMPLINGS["plain"], stop_token_ids=(3,))
    asked = Asked((1, 0, 2, 1, 3), sampling, method)
    batch, texts, num_drafted = [asked] * 500, list[Tokens](), 0
    service = Service(TINY_TARGET, seed=13, num_blocks=2100)
    for seed in range(4):
        for depth, max_turns in ((2, 1), (2, 2)):
            drafter = OracleDrafter(TINY_DRAFT, batch, depth, top_k=3, seed=seed, max_turns=max_turns)
            for told in service.run(batch, drafter):
                texts.append(tuple(told.token_ids))
                num_drafted += sum(result.num_drafted for result in told.results)
    assert num_drafted
    assert p_value(texts, exact(asked)) > LEAST_P_VALUE


@pytest.mark.parametrize("by", ["request", "service"])
def test_a_draft_that_is_not_trusted_may_lie_about_q(by: str) -> None:
    """It always drafts token 0 and claims that this was next to impossible: it would always be accepted."""
    asked = Asked((1, 0, 2), replace(SAMPLINGS["plain"], max_tokens=SHORT), Method.REJECTION)
    batch = [replace(asked, trust_draft=by != "request")] * 500
    lie = SparseDistributions(
        sizes=np.array([2], dtype=np.int32),
        token_ids=np.array([0, 1], dtype=np.int32),
        probs=np.array([1e-6, 1 - 1e-6], dtype=np.float32),
    )

    def lying(committed: dict[int, list[int]]) -> dict[int, Draft]:
        return {n: Draft(n, len(token_ids), (0,), lie) for n, token_ids in committed.items()}

    service = Service(TINY_TARGET, seed=12, num_blocks=2100, trust_draft=by != "service")
    texts = [tuple(told.token_ids) for _ in range(4) for told in service.run(batch, lying)]
    assert p_value(texts, exact(asked)) > LEAST_P_VALUE
    trusting = Service(TINY_TARGET, seed=12, num_blocks=2100)
    deceived = [tuple(told.token_ids) for told in trusting.run([asked] * 500, lying)]
    assert p_value(deceived, exact(asked)) < LEAST_P_VALUE
