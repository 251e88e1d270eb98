"""What is drawn against what is handed on as q, where every transform cuts something off."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draft_service.drawing import Draws, draw_coupled, draw_greedy, draw_sampled
from specdecode.lm.cpu import Kernels, load_kernels
from specdecode.sampling import Window
from specdecode.types import SamplingParams

VOCAB_SIZE = 40
CELLS = 4_000
NUM_COLUMNS, NUM_ROWS = 500, 200


def loaded(dtype: torch.dtype = torch.float32) -> Kernels:
    kernels = load_kernels(dtype)
    assert kernels is not None
    return kernels


@pytest.mark.parametrize("use_kernels", [False, True])
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
    sampling: SamplingParams, top_k: int, support: int | None, use_kernels: bool
) -> None:
    """u on a fine grid: each token gets a share of the grid that is its probability, within one cell."""
    logits = 1.5 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(7))
    u = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    windows = [Window(sampling, [1, 2, 3], 3)] * CELLS
    kernels = loaded() if use_kernels else None
    drawn_rows = draw_sampled(logits.expand(CELLS, -1), windows, u, top_k, kernels)
    draws = [draw for draw in drawn_rows if draw is not None]
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


TRANSFORMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=30.0),
    SamplingParams(temperature=0.05),
    SamplingParams(temperature=1.2, top_k=1),
    SamplingParams(temperature=1.2, top_k=90),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=1.0, min_p=0.1),
]


def assert_same(found: Draws, expected: Draws) -> None:
    """The same tokens, by the same q."""
    assert len(found) == len(expected)
    for mine, own in zip(found, expected, strict=True):
        if mine is None or own is None:
            assert mine is own is None
            continue
        assert mine.token == own.token
        assert (mine.q is None) == (own.q is None)
        if mine.q is not None and own.q is not None:
            large = own.q.probs > 1e-30  # what is smaller may be nothing on the kernel
            num_large = int(large.sum())
            assert mine.q.token_ids[:num_large].tolist() == own.q.token_ids[large].tolist()
            assert mine.q.token_ids.dtype == np.int32
            assert mine.q.probs[:num_large] == pytest.approx(own.q.probs[large], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 7, 64, NUM_COLUMNS])
@pytest.mark.parametrize("reduced", [False, True])
def test_kernels_draw_what_torch_draws(dtype: torch.dtype, top_k: int, reduced: bool) -> None:
    """Each row by transforms of its own; columns may stand for some ids of a larger vocabulary."""
    generator = torch.Generator().manual_seed(top_k)
    logits = (3 * torch.randn(NUM_ROWS, NUM_COLUMNS, generator=generator)).to(dtype)
    logits[5], logits[6, 3], logits[7, 3:] = -torch.inf, torch.nan, -torch.inf
    windows = [Window(TRANSFORMS[row % len(TRANSFORMS)], [1] * row, 1) for row in range(NUM_ROWS)]
    ids = torch.randperm(9_000, generator=generator)[:NUM_COLUMNS].sort().values if reduced else None
    u = torch.rand(NUM_ROWS, dtype=torch.float64, generator=generator)
    u[0], u[1] = 0.0, 1.0 - 2.0**-53
    kernels = loaded(dtype)
    sampled = draw_sampled(logits, windows, u, top_k, kernels, ids)
    assert_same(sampled, draw_sampled(logits, windows, u, top_k, None, ids))
    seeds, choices = [2**64 - 1 - row for row in range(NUM_ROWS)], [row % 3 for row in range(NUM_ROWS)]
    coupled = draw_coupled(logits, windows, seeds, choices, top_k, kernels, ids)
    assert_same(coupled, draw_coupled(logits, windows, seeds, choices, top_k, None, ids))
    assert [row for row, draw in enumerate(sampled) if draw is None] == [5, 6]
    if top_k > 1:
        assert [draw and draw.token for draw in sampled] != [draw and draw.token for draw in coupled]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", [False, True])
def test_kernels_pick_what_torch_picks(dtype: torch.dtype, broken: bool) -> None:
    logits = torch.randn(20, NUM_COLUMNS, generator=torch.Generator().manual_seed(4)).to(dtype)
    logits[3, [8, 30]] = 50.0
    if broken:
        logits[5], logits[6], logits[7, 3:] = -torch.inf, torch.nan, -torch.inf
    windows = [Window(SamplingParams(temperature=0.0), [0], 1)] * 20
    ids = torch.arange(NUM_COLUMNS) * 2 + 1
    picked = draw_greedy(logits, windows, loaded(dtype), ids)
    assert_same(picked, draw_greedy(logits, windows, None, ids))
    assert picked[3] is not None
    assert picked[3].token == 17
    assert [row for row, draw in enumerate(picked) if draw is None] == ([5, 6] if broken else [])
