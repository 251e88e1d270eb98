"""The real model's second and third token under sampled verification, against the exact distribution.

20,480 samples per method go through the real drafter, engine, scheduler and verification. Logits of equal
contexts are computed once by the real model and remembered: they are equal for all samples, and there are a
few hundred contexts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
import scipy.stats
import torch

from draft_service.drafting import SequenceKey
from draft_service.model import DraftLimits, ModelDrafter
from specdecode.lm.model import LoadedModel, load_model
from specdecode.lm.runner import Chunk, PagedLM
from specdecode.lm.sequence import KVSequence
from specdecode.models import resolve
from specdecode.tokenizer import load_tokenizer
from specdecode.types import (
    DecodeFrame,
    Draft,
    DrafterKind,
    Lease,
    Method,
    OpenDraft,
    OpenSequence,
    Propose,
    SamplingParams,
    Verify,
)
from target_service.engine import Engine

NUM_SAMPLES = 20_480
BATCH = 256
VOCAB_SIZE = 8192
"""Ids above are cut off both models: less to sort for each of 60,000 rows, nothing else changes."""
TOP_K = 8
NUM_DRAFTED = 2
SAMPLING = SamplingParams(temperature=1.3, top_k=TOP_K, max_tokens=3)


class RememberingLM(PagedLM):
    """A paged model that runs each context once."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model, num_blocks=4 * BATCH)
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._fed: dict[KVSequence, list[int]] = {}

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        rows = []
        for chunk in chunks:
            chunk.sequence.reserve(len(chunk.token_ids))
            known = self._fed.get(chunk.sequence, [])[: chunk.sequence.kv_len]
            fed = [*known, *chunk.token_ids]
            self._fed[chunk.sequence] = fed
            chunk.sequence.kv_len = len(fed)
            rows += [self.logits(fed[: len(fed) - i]) for i in reversed(range(chunk.num_logits))]
        return torch.stack(rows) if rows else torch.empty(0, self.model.vocab_size)

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        key = tuple(context)
        if key not in self._logits:
            scratch = self.new_sequence(key)
            self._logits[key] = super().forward([Chunk(scratch, key, 1)])[0]
            scratch.release()
        return self._logits[key]


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
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


def next_distribution(lm: RememberingLM, context: tuple[int, ...]) -> dict[int, float]:
    """p by its definition, in float64, apart from the product's code."""
    logits = lm.logits(context).double().numpy()
    best = np.argsort(-logits, kind="stable")[:TOP_K]
    weights = np.exp((logits[best] - logits[best[0]]) / SAMPLING.temperature)
    return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))


def exact_continuations(lm: RememberingLM, prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of three tokens."""
    paths = {(): 1.0}
    for _ in range(3):
        paths = {
            (*path, token): mass * p
            for path, mass in paths.items()
            for token, p in next_distribution(lm, prompt + path).items()
        }
    return paths


def drafts_for(drafter: ModelDrafter, prompt: tuple[int, ...], method: Method, stream: int) -> list[Draft]:
    sequences = []
    for number in range(BATCH):
        order = OpenDraft(number, prompt, len(prompt), SAMPLING, method, DrafterKind.MODEL)
        sequences.append(drafter.open(SequenceKey(stream, number), order))
        sequences[-1].propose(Propose(number, len(prompt), (), NUM_DRAFTED))
    answers = []
    while drafter.busy:
        answers += drafter.advance()
    for sequence in sequences:
        sequence.close()
    return [answer.draft for answer in answers]


def run_batch(
    engine: Engine, prompt: tuple[int, ...], method: Method, drafts: Sequence[Draft]
) -> list[tuple[int, ...]]:
    outputs: dict[int, list[int]] = {draft.sequence: [] for draft in drafts}
    opens = tuple(OpenSequence(n, prompt, len(prompt), SAMPLING, method) for n in outputs)
    verifies = tuple(Verify(d.sequence, len(prompt), d.token_ids, d.q) for d in drafts)
    engine.apply(1, DecodeFrame(opens, verifies))
    while engine.sequences:
        leases = []
        for key, result in engine.step().results:
            assert result.error is None
            outputs[key.sequence] += result.token_ids
            if not result.ended:
                leases.append(Lease(key.sequence, result.committed_length, 3))
        engine.apply(1, DecodeFrame(leases=tuple(leases)))
    return [tuple(output) for output in outputs.values()]


def p_value(observed: Counter[int], expected: dict[int, float]) -> float:
    """χ² with bins of at least five expected, the rest in one."""
    assert set(observed) <= set(expected)
    total = sum(observed.values())
    large = [token for token, p in expected.items() if p * total >= 5]
    counts = [observed[token] for token in large]
    means = [expected[token] * total for token in large]
    if len(large) < len(expected):
        counts.append(total - sum(counts))
        means.append(total - sum(means))
    if means[-1] < 1e-9 * total:
        counts, means = counts[:-1], means[:-1]
    return float(scipy.stats.chisquare(counts, np.array(means) * (sum(counts) / sum(means))).pvalue)


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
def test_second_and_third_token_have_the_exact_distribution(
    method: Method, prompt: tuple[int, ...], target: RememberingLM, draft: RememberingLM
) -> None:
    engine = Engine(target, generator=torch.Generator().manual_seed(11))
    drafter = ModelDrafter(draft, DraftLimits(), torch.Generator().manual_seed(12))
    samples: Counter[tuple[int, ...]] = Counter()
    streams = count()
    while samples.total() < NUM_SAMPLES:
        drafts = drafts_for(drafter, prompt, method, next(streams))
        samples.update(run_batch(engine, prompt, method, drafts))
    exact = exact_continuations(target, prompt)
    for position in (1, 2):
        observed: Counter[int] = Counter()
        expected: dict[int, float] = {}
        for path, number in samples.items():
            observed[path[position]] += number
        for path, mass in exact.items():
            expected[path[position]] = expected.get(path[position], 0.0) + mass
        assert len(expected) > TOP_K
        assert p_value(observed, expected) >= 1e-4
