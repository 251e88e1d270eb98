"""What is drawn against what is handed on as q, where every transform cuts something off."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draft_service.drawing import draw_sampled
from specdecode.sampling import Window
from specdecode.types import SamplingParams

VOCAB_SIZE = 40
CELLS = 4_000


@pytest.mark.parametrize(
    ("sampling", "top_k", "support"),
    [
        pytest.param(SamplingParams(temperature=0.7), 64, 40, id="temperature"),
        pytest.param(SamplingParams(temperature=1.4), 5, 5, id="the drafter's top-k"),
        pytest.param(SamplingParams(top_k=3), 5, 3, id="the request's top-k"),
        pytest.param(SamplingParams(temperature=1.5, top_p=0.5), 30, None, id="top-p"),
        pytest.param(SamplingParams(min_p=0.3), 30, None, id="min-p"),
    ],
)
def test_draws_follow_the_q_that_is_handed_on(
    sampling: SamplingParams, top_k: int, support: int | None
) -> None:
    """u on a fine grid: each token gets a share of the grid that is its probability, within one cell."""
    logits = 1.5 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(7))
    u = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    windows = [Window(sampling, [1, 2, 3], 3)] * CELLS
    draws = [draw for draw in draw_sampled(logits.expand(CELLS, -1), windows, u, top_k) if draw is not None]
    assert len(draws) == CELLS
    handed_on = draws[0].q
    assert handed_on is not None
    assert 1 < len(handed_on.token_ids) < VOCAB_SIZE or support == VOCAB_SIZE
    assert support in (None, len(handed_on.token_ids))
    q = np.zeros(VOCAB_SIZE)
    q[handed_on.token_ids] = handed_on.probs
    assert q.sum() == pytest.approx(1.0, abs=1e-6)
    drawn = np.bincount([draw.token for draw in draws], minlength=VOCAB_SIZE) / CELLS
    assert np.abs(drawn - q).max() <= 1.01 / CELLS
    tempered = torch.softmax(logits[0] / sampling.temperature, dim=0).numpy()
    kept = handed_on.token_ids
    assert handed_on.probs == pytest.approx(tempered[kept] / tempered[kept].sum(), abs=1e-6)
