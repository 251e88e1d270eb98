"""Drafts from a reduced vocabulary are exact by every method, through the real drafter and engine.

Target and draft are tiny random models; the draft has a head of 24 of 61 ids, and so often lacks what the
target would say.
"""

from __future__ import annotations

import copy

import pytest
import torch

from draft_service.drafting import SequenceKey
from draft_service.model import DraftLimits, ModelDrafter
from specdecode.lm.model import LoadedModel, adopt_model
from specdecode.lm.runner import PagedLM
from specdecode.types import (
    DecodeFrame,
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
from tests.draft.tiny import VOCAB_SIZE, plain_model
from tests.exactness.continuations import RememberingLM, Tokens, exact, p_values, sampled

NUM_SAMPLES = 20_480
NUM_IDS = 24
PROMPT: Tokens = (4, 9, 33, 2, 17)


def target_model() -> LoadedModel:
    return adopt_model(copy.deepcopy(plain_model()), "target")


def draft_model(token_ids: torch.Tensor) -> LoadedModel:
    """The target with disturbed weights and the head of these ids."""
    module = copy.deepcopy(plain_model())
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    return adopt_model(module, "draft", draft_vocabulary=token_ids)


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randperm(VOCAB_SIZE, generator=generator)[:NUM_IDS].sort().values


@pytest.mark.parametrize("top_k", [12, 40])
@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
def test_sampled_tokens_have_the_exact_distribution(
    method: Method, top_k: int, token_ids: torch.Tensor
) -> None:
    """With top-k 40 the draft has fewer ids than may survive."""
    target, draft = RememberingLM(target_model()), RememberingLM(draft_model(token_ids))
    sampling = SamplingParams(temperature=1.1, top_k=top_k)
    samples, num_accepted = sampled(target, draft, PROMPT, sampling, method, NUM_SAMPLES)
    expected = exact(target, PROMPT, sampling)
    assert 0.1 * NUM_SAMPLES < num_accepted < 1.9 * NUM_SAMPLES
    drafted = set(token_ids.tolist())
    assert any(path[0] not in drafted for path in samples)
    assert min(p_values(samples, expected)) >= 1e-4


def text(
    engine: Engine, drafter: ModelDrafter | None, sampling: SamplingParams, method: Method
) -> tuple[list[int], int]:
    """One sequence's tokens, each round drafted by `drafter` (without one by leases); accepted drafts."""
    opened = OpenSequence(1, PROMPT, len(PROMPT), sampling, method, seed=77)
    engine.apply(1, DecodeFrame(opens=(opened,)))
    output: list[int] = []
    num_accepted = 0
    key = SequenceKey(0, 1)
    order = OpenDraft(1, PROMPT, len(PROMPT), sampling, method, DrafterKind.MODEL, seed=77)
    sequence = None if drafter is None else drafter.open(key, order)
    known = len(PROMPT)
    while engine.sequences:
        length = len(PROMPT) + len(output)
        if drafter is None or sequence is None:
            engine.apply(1, DecodeFrame(leases=(Lease(1, length, 1),)))
        else:
            sequence.propose(Propose(1, known, tuple(output[known - len(PROMPT) :]), 4))
            known = length
            answers = []
            while drafter.busy:
                answers += drafter.advance()
            draft = answers[0].draft
            engine.apply(1, DecodeFrame(verifies=(Verify(1, length, draft.token_ids, draft.q),)))
        for _, result in engine.step().results:
            assert result.error is None
            output += result.token_ids
            num_accepted += result.num_accepted
    return output, num_accepted


@pytest.mark.parametrize("method", [Method.GREEDY, Method.COUPLED])
def test_greedy_and_seeded_texts_are_those_without_drafts(method: Method, token_ids: torch.Tensor) -> None:
    temperature = 0.0 if method is Method.GREEDY else 1.2
    sampling = SamplingParams(temperature=temperature, top_p=0.95, repetition_penalty=1.2, max_tokens=60)
    engine = Engine(PagedLM(target_model(), num_blocks=32))
    drafter = ModelDrafter(
        PagedLM(draft_model(token_ids), num_blocks=32), DraftLimits(), torch.Generator().manual_seed(3)
    )
    plain, _ = text(engine, None, sampling, method)
    drafted, num_accepted = text(engine, drafter, sampling, method)
    assert drafted == plain
    assert len(plain) == 60
    assert num_accepted > 0
    assert set(plain) - set(token_ids.tolist())
