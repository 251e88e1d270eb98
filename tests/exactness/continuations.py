"""Continuations of a prompt, sampled through drafter and engine, and their exact distribution.

Logits of equal contexts are computed once and remembered: they are equal for all samples, and there are a few
hundred contexts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import scipy.stats
import torch

from draft_service.drafting import SequenceKey
from draft_service.model import DraftLimits, ModelDrafter
from specdecode.lm.model import LoadedModel
from specdecode.lm.runner import Chunk, PagedLM
from specdecode.lm.sequence import KVSequence
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

BATCH = 256
NUM_TOKENS = 3
NUM_DRAFTED = 2

Tokens = tuple[int, ...]


class RememberingLM(PagedLM):
    """A paged model that runs each context once."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model, num_blocks=4 * BATCH)
        self._logits: dict[Tokens, torch.Tensor] = {}
        self._fed: dict[KVSequence, list[int]] = {}

    def forward_columns(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        rows = []
        for chunk in chunks:
            chunk.sequence.reserve(len(chunk.token_ids))
            known = self._fed.get(chunk.sequence, [])[: chunk.sequence.kv_len]
            fed = [*known, *chunk.token_ids]
            self._fed[chunk.sequence] = fed
            chunk.sequence.kv_len = len(fed)
            rows += [self._columns(fed[: len(fed) - i]) for i in reversed(range(chunk.num_logits))]
        return torch.stack(rows) if rows else torch.empty(0, self.model.num_columns)

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        """[vocab_size] after `context`."""
        return self.spread(self._columns(context)[None])[0]

    def _columns(self, context: Sequence[int]) -> torch.Tensor:
        key = tuple(context)
        if key not in self._logits:
            scratch = self.new_sequence(key)
            self._logits[key] = super().forward_columns([Chunk(scratch, key, 1)])[0]
            scratch.release()
        return self._logits[key]


def exact(lm: RememberingLM, prompt: Tokens, sampling: SamplingParams) -> dict[Tokens, float]:
    """Probability of every continuation of `NUM_TOKENS` tokens, by temperature and top-k alone."""
    paths: dict[Tokens, float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        paths = {
            (*path, token): mass * p
            for path, mass in paths.items()
            for token, p in _next(lm, prompt + path, sampling).items()
        }
    return paths


def _next(lm: RememberingLM, context: Tokens, sampling: SamplingParams) -> dict[int, float]:
    """p by its definition, in float64, apart from the product's code."""
    logits = lm.logits(context).double().numpy()
    best = np.argsort(-logits, kind="stable")[: sampling.top_k]
    weights = np.exp((logits[best] - logits[best[0]]) / sampling.temperature)
    return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))


def sampled(
    target: RememberingLM,
    draft: RememberingLM,
    prompt: Tokens,
    sampling: SamplingParams,
    method: Method,
    num_samples: int,
) -> tuple[Counter[Tokens], int]:
    """Continuations through the real drafter, engine, scheduler and verification; and how many drafts were
    accepted.
    """
    sampling = replace(sampling, max_tokens=NUM_TOKENS)
    engine = Engine(target, generator=torch.Generator().manual_seed(11))
    drafter = ModelDrafter(draft, DraftLimits(), torch.Generator().manual_seed(12))
    samples: Counter[Tokens] = Counter()
    num_accepted = 0
    streams = count()
    while samples.total() < num_samples:
        drafts = _drafts(drafter, prompt, sampling, method, next(streams))
        texts, accepted = _run_batch(engine, prompt, sampling, method, drafts)
        samples.update(texts)
        num_accepted += accepted
    return samples, num_accepted


def _drafts(
    drafter: ModelDrafter, prompt: Tokens, sampling: SamplingParams, method: Method, stream: int
) -> list[Draft]:
    sequences = []
    for number in range(BATCH):
        order = OpenDraft(number, prompt, len(prompt), sampling, method, DrafterKind.MODEL)
        sequences.append(drafter.open(SequenceKey(stream, number), order))
        sequences[-1].propose(Propose(number, len(prompt), (), NUM_DRAFTED))
    answers = []
    while drafter.busy:
        answers += drafter.advance()
    for sequence in sequences:
        sequence.close()
    return [answer.draft for answer in answers]


def _run_batch(
    engine: Engine, prompt: Tokens, sampling: SamplingParams, method: Method, drafts: Sequence[Draft]
) -> tuple[list[Tokens], int]:
    outputs: dict[int, list[int]] = {draft.sequence: [] for draft in drafts}
    num_accepted = 0
    opens = tuple(OpenSequence(n, prompt, len(prompt), sampling, method) for n in outputs)
    verifies = tuple(Verify(d.sequence, len(prompt), d.token_ids, d.q) for d in drafts)
    engine.apply(1, DecodeFrame(opens, verifies))
    while engine.sequences:
        leases = []
        for key, result in engine.step().results:
            assert result.error is None
            outputs[key.sequence] += result.token_ids
            num_accepted += result.num_accepted
            if not result.ended:
                leases.append(Lease(key.sequence, result.committed_length, NUM_TOKENS))
        engine.apply(1, DecodeFrame(leases=tuple(leases)))
    return [tuple(output) for output in outputs.values()], num_accepted


def p_values(samples: Mapping[Tokens, int], expected: Mapping[Tokens, float]) -> list[float]:
    """χ² of the token at each position."""
    values = []
    for position in range(NUM_TOKENS):
        observed: Counter[int] = Counter()
        masses: dict[int, float] = {}
        for path, number in samples.items():
            observed[path[position]] += number
        for path, mass in expected.items():
            masses[path[position]] = masses.get(path[position], 0.0) + mass
        values.append(_p_value(observed, masses))
    return values


def _p_value(observed: Counter[int], expected: Mapping[int, float]) -> float:
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
