"""Coupled picks: each side samples its own distribution, they agree as often as the formula says, and what is
emitted is a function of the target, the seed and the choice alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from specdecode.noise import coupled_support_tokens, coupled_tokens, exponential_noise, race_winners
from specdecode.verification import Drafts, verify_picks
from tests.exactness.table_model import TableModel

LEAST_P_VALUE = 1e-4
NUM_SAMPLES = 100_000

DISTRIBUTIONS = [
    (0.7, 0.3),
    (0.5, 0.25, 0.25),
    (0.6, 0.3, 0.07, 0.03),
    (0.0, 0.9, 0.1),
    (0.2, 0.0, 0.3, 0.5, 0.0),
]
PAIRS = [
    ((0.7, 0.3), (0.5, 0.5)),
    ((0.5, 0.25, 0.25), (0.25, 0.5, 0.25)),
    ((0.1, 0.2, 0.3, 0.4), (0.4, 0.3, 0.2, 0.1)),
    ((0.6, 0.4, 0.0), (0.0, 0.5, 0.5)),
    ((0.6, 0.3, 0.1), (1.0, 0.0, 0.0)),
    ((0.6, 0.3, 0.1), (0.6, 0.3, 0.1)),
]


def match_probability(p: Sequence[float], q: Sequence[float]) -> float:
    """Σ_j 1 / Σ_i max(p_i/p_j, q_i/q_j) over the common support."""
    common = [j for j in range(len(p)) if p[j] > 0 and q[j] > 0]
    return sum(1 / sum(max(x / p[j], y / q[j]) for x, y in zip(p, q, strict=True)) for j in common)


def race(u: torch.Tensor, probs: Sequence[float]) -> list[int]:
    """Winners among the tokens of positive probability for rows of u over the whole vocabulary."""
    support = torch.tensor([token for token, mass in enumerate(probs) if mass > 0])
    rows, columns = (x.reshape(-1) for x in torch.meshgrid(torch.arange(len(u)), support, indexing="ij"))
    weights = torch.tensor(probs, dtype=torch.float64)[columns]
    return race_winners(u[rows, columns], weights, rows, columns, len(u)).tolist()


def win_probability(token: int, p: Sequence[float], q: Sequence[float]) -> float:
    """Pr[token wins the race of p and that of q on the same noise], by quadrature over the token's own u.

    Given the token's u, it wins both iff every other token's u_y < u^r_y with r_y = max(p_y/p, q_y/q): the
    code is called just inside all these thresholds, and just beyond each of them in turn.
    """
    nodes, weights = np.polynomial.legendre.leggauss(120)
    t, power = (nodes + 1) / 2, 6  # u = t^6: smooth at 0 whatever the exponents
    u = t**power
    others = [y for y in range(len(p)) if y != token]
    ratios = np.array([max(p[y] / p[token], q[y] / q[token]) for y in others])
    bounds = u[:, None] ** ratios
    for beyond in (None, *range(len(others))):
        points = np.full((len(u), len(p)), 0.5)
        points[:, token] = u
        for column, other in enumerate(others):
            points[:, other] = bounds[:, column] * (1 + 1e-11 if column == beyond else 1 - 1e-11)
        usable = ((points > 1e-300) & (points < 1)).all(axis=1)
        if beyond is None or ratios[beyond] > 0:
            wins = [race(torch.from_numpy(points[usable]), side) for side in (p, q)]
            both = [one == token and other == token for one, other in zip(*wins, strict=True)]
            assert both == [beyond is None] * int(usable.sum())
    return float((weights / 2 * power * t ** (power - 1) * bounds.prod(axis=1)).sum())


@pytest.mark.parametrize("p", DISTRIBUTIONS)
def test_the_winner_is_distributed_as_p(p: Sequence[float]) -> None:
    for token, mass in enumerate(p):
        if mass > 0:
            assert win_probability(token, p, p) == pytest.approx(mass, abs=1e-12)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_both_sides_match_as_often_as_the_formula_says(p: Sequence[float], q: Sequence[float]) -> None:
    common = [token for token in range(len(p)) if p[token] > 0 and q[token] > 0]
    by_quadrature = sum(win_probability(token, p, q) for token in common)
    assert by_quadrature == pytest.approx(match_probability(p, q), abs=1e-12)
    distance = 0.5 * sum(abs(x - y) for x, y in zip(p, q, strict=True))
    assert (1 - distance) / (1 + distance) - 1e-12 <= by_quadrature <= 1 - distance + 1e-12


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_hashed_picks_match_as_often_as_the_formula_says(p: Sequence[float], q: Sequence[float]) -> None:
    picks = [picks_of(side, positions=torch.arange(NUM_SAMPLES)) for side in (p, q)]
    matches = int((picks[0] == picks[1]).sum())
    assert stats.binomtest(matches, NUM_SAMPLES, min(1.0, match_probability(p, q))).pvalue > LEAST_P_VALUE


def picks_of(
    p: Sequence[float],
    *,
    seeds: torch.Tensor | None = None,
    choices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The picks of many rows with the same p."""
    rows = torch.tensor(p, dtype=torch.float64).expand(NUM_SAMPLES, -1)
    zeros = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    arguments = (zeros + 3 if seeds is None else seeds, choices, positions)
    return coupled_tokens(rows, *(zeros if x is None else x for x in arguments))


COUNTERS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "positions": lambda: {"positions": torch.arange(NUM_SAMPLES)},
    "choices": lambda: {"choices": torch.arange(NUM_SAMPLES)},
    "seeds": lambda: {"seeds": torch.arange(NUM_SAMPLES)},
    "all": lambda: {
        "seeds": torch.arange(NUM_SAMPLES) % 50 << 50,
        "choices": torch.arange(NUM_SAMPLES) // 50 % 8,
        "positions": torch.arange(NUM_SAMPLES) // 400 + 17,
    },
}


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("p", DISTRIBUTIONS)
def test_hashed_picks_are_distributed_as_p(p: Sequence[float], counter: str) -> None:
    counts = torch.bincount(picks_of(p, **COUNTERS[counter]()), minlength=len(p)).numpy()
    masses = np.array(p)
    assert counts[masses == 0].sum() == 0
    assert stats.chisquare(counts[masses > 0], masses[masses > 0] * NUM_SAMPLES).pvalue > LEAST_P_VALUE


@pytest.mark.parametrize("counter", COUNTERS)
def test_neighbouring_picks_are_independent(counter: str) -> None:
    p = np.array([0.4, 0.35, 0.25])
    picks = picks_of(p.tolist(), **COUNTERS[counter]()).numpy()
    joint = np.bincount(picks[:-1] * 3 + picks[1:], minlength=9)
    assert stats.chisquare(joint, np.outer(p, p).ravel() * (NUM_SAMPLES - 1)).pvalue > LEAST_P_VALUE


def test_picks_of_a_large_vocabulary_are_uniform_over_its_tokens() -> None:
    p = torch.full((1, 4096), 1 / 4096).expand(20_000, -1)
    picks = coupled_tokens(p, [9] * 20_000, [0] * 20_000, range(20_000))
    assert stats.chisquare(np.bincount(picks.numpy() // 64, minlength=64)).pvalue > LEAST_P_VALUE


def test_a_pick_is_the_least_noise_over_probability() -> None:
    generator = torch.Generator().manual_seed(2)
    p = torch.softmax(3 * torch.randn(40, 997, generator=generator), dim=1)
    p[:, ::3] = 0
    seeds, choices, positions = (
        [2**64 - 1 - row for row in range(40)],
        [row % 3 for row in range(40)],
        range(5, 45),
    )
    picks = coupled_tokens(p, seeds, choices, positions)
    for row in range(40):
        noise = exponential_noise(seeds[row], choices[row], positions[row], torch.arange(997))
        assert picks[row] == (noise / p[row].double()).argmin()
        assert p[row, picks[row]] > 0


def test_a_pick_does_not_depend_on_its_batch() -> None:
    """Also where a batch is handled in several parts."""
    p = torch.softmax(2 * torch.randn(12, 20_000, generator=torch.Generator().manual_seed(3)), dim=1)
    p[4:8, 50:] = 0
    together = coupled_tokens(p, [1] * 12, [0] * 12, range(12))
    alone = [coupled_tokens(p[row : row + 1], [1], [0], [row]).item() for row in range(12)]
    assert together.tolist() == alone


def test_picks_by_support_are_the_picks_of_the_whole_row() -> None:
    generator = torch.Generator().manual_seed(4)
    p = torch.softmax(3 * torch.randn(64, 300, generator=generator), dim=1)
    probs, token_ids = p.topk(20, dim=1)
    dense = torch.zeros_like(p).scatter(1, token_ids, probs)
    probs = torch.cat([probs, torch.zeros(64, 5)], dim=1)  # padding: a true id, but without probability
    token_ids = torch.cat([token_ids, token_ids[:, :5]], dim=1)
    rows = [7] * 64, [1] * 64, range(64)
    assert coupled_support_tokens(token_ids, probs, *rows).equal(coupled_tokens(dense, *rows))
    assert coupled_support_tokens(token_ids.int(), 3 * probs, *rows).equal(coupled_tokens(dense, *rows))


def test_equal_scores_go_to_the_lowest_id() -> None:
    half = torch.full((6,), 0.5, dtype=torch.float64)
    rows = torch.tensor([0, 0, 0, 1, 1, 1])
    winners = race_winners(
        half, torch.tensor([0.3, 0.3, 0.3, 0.1, 0.3, 0.3]), rows, torch.tensor([5, 4, 9, 0, 8, 2]), 2
    )
    assert winners.tolist() == [4, 2]


def test_the_extremes_of_u_are_finite_and_in_order() -> None:
    u = torch.tensor([2.0**-53, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    token_ids, rows = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    assert race_winners(u, torch.tensor([1.0, 1e-30, 1e-30]), rows, token_ids, 1).tolist() == [0]
    assert race_winners(u, torch.tensor([1.0, 1e-10, 1.0]), rows, token_ids, 1).tolist() == [1]


def test_a_row_of_nan_gets_some_token_and_leaves_the_batch_alone() -> None:
    p = torch.full((2, 4), 0.25)
    expected = coupled_tokens(p, [1, 1], [0, 0], [0, 1])
    p[0] = torch.nan
    picks = coupled_tokens(p, [1, 1], [0, 0], [0, 1])
    assert 0 <= picks[0] < 4
    assert picks[1] == expected[1]


LENGTH = 60


def generated(
    target: TableModel, draft: TableModel | None, num_draft_tokens: int, *, seed: int, choice_index: int = 0
) -> list[int]:
    """LENGTH tokens by rounds of coupled drafting and verification; without a draft, γ = 0."""
    tokens: list[int] = []
    while len(tokens) < LENGTH:
        drafted: list[int] = []
        while draft is not None and len(drafted) < num_draft_tokens:
            drafted.append(pick(draft, [*tokens, *drafted], seed, choice_index))
        picks = [pick(target, [*tokens, *drafted[:i]], seed, choice_index) for i in range(len(drafted) + 1)]
        drafts = Drafts(
            torch.tensor([drafted], dtype=torch.int64),
            torch.tensor([len(drafted)]),
            torch.zeros(1, len(drafted), 0, dtype=torch.int64),
            torch.zeros(1, len(drafted), 0),
        )
        verified = verify_picks(torch.tensor(picks), torch.tensor([0]), drafts)
        tokens += [*drafted[: int(verified.accepted)], int(verified.next_token)]
    return tokens[:LENGTH]


def pick(model: TableModel, history: list[int], seed: int, choice_index: int) -> int:
    p = torch.tensor([model.next(history)], dtype=torch.float64)
    return int(coupled_tokens(p, [seed], [choice_index], [len(history)]))


def test_output_does_not_depend_on_drafter_or_depth() -> None:
    target = TableModel.random(0, 4, 3)
    drafters = {
        "same": target,
        "other": TableModel.random(1, 4, 3),
        "sparse": TableModel.random(2, 4, 3, support=2),
        "one-hot": TableModel.random(3, 4, 2).one_hot(),
    }
    plain = {seed: generated(target, None, 0, seed=seed) for seed in (0, 1, 2**64 - 1)}
    assert len({tuple(tokens) for tokens in plain.values()}) == 3
    for drafter in drafters.values():
        for num_draft_tokens in (1, 2, 3, 8):
            for seed, tokens in plain.items():
                assert generated(target, drafter, num_draft_tokens, seed=seed) == tokens


def test_choices_of_one_seed_differ() -> None:
    target = TableModel.random(0, 4, 3)
    texts = {tuple(generated(target, None, 0, seed=5, choice_index=choice)) for choice in range(8)}
    assert len(texts) == 8
