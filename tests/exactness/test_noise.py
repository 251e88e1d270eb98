"""The hash behind a seed: pinned bits, the same everywhere, and statistically a standard exponential."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from specdecode.noise import exponential_noise, portable_log, to_int64

LEAST_P_VALUE = 1e-4
MASK = (1 << 64) - 1


def mixed(z: int) -> int:
    """splitmix64's finalizer on Python's own integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_uniform(seed: int, choice_index: int, position: int, token: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mixed((seed + golden) & MASK)
    for counter in (choice_index, position, token):
        key = mixed((key + (counter + 1) * golden) & MASK)
    return ((key >> 12) + 0.5) / 2**52


def uniforms(
    seed: int | torch.Tensor,
    choice_index: int | torch.Tensor,
    position: int | torch.Tensor,
    token: int | torch.Tensor,
) -> npt.NDArray[np.float64]:
    """The u that the noise is made of."""
    return np.asarray(torch.exp(-exponential_noise(seed, choice_index, position, token)).numpy())


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_is_the_published_hash(seed: int) -> None:
    for choice_index, position, token in product((0, 1, 7), (0, 1, 4095), (0, 1, 49151, 262143)):
        expected = -math.log(reference_uniform(seed, choice_index, position, token))
        noise = exponential_noise(seed, choice_index, position, token)
        assert noise.dtype == torch.float64
        assert noise.item() == pytest.approx(expected, rel=4 * np.finfo(float).eps)


def test_pinned_values() -> None:
    """Releases must agree on a seed's text, and so must target and draft: these bits never change."""
    pinned = {
        (0, 0, 0, 0): "0x1.057f6771bebd4p+1",
        (1234, 0, 10, 3): "0x1.4adb4e3154344p+0",
        (1234, 1, 10, 3): "0x1.81514010f796ep-2",
        (2**64 - 1, 3, 100_000, 151_935): "0x1.ab2e1b104550ep+1",
    }
    assert {key: float(exponential_noise(*key)).hex() for key in pinned} == pinned


def test_each_of_the_four_counts() -> None:
    keys = [(5, 0, 9, 3), (6, 0, 9, 3), (5, 1, 9, 3), (5, 0, 10, 3), (5, 0, 9, 4), (0, 5, 3, 9), (9, 0, 5, 3)]
    assert len({exponential_noise(*key).item() for key in keys}) == len(keys)


def test_a_seed_is_its_64_bits() -> None:
    assert [to_int64(x) for x in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 2**63 - 1, -(2**63), -1]
    as_tensor = exponential_noise(torch.tensor([-1, -(2**63)]), 0, 0, 0)
    assert as_tensor.tolist() == [exponential_noise(seed, 0, 0, 0).item() for seed in (2**64 - 1, 2**63)]


def test_is_the_same_bits_in_every_shape_and_layout() -> None:
    positions, tokens = torch.arange(100, 107), torch.randint(0, 2**18, (1003,))
    grid = exponential_noise(11, 2, positions[:, None], tokens)
    assert grid.shape == (7, 1003)
    for row, column in [(0, 0), (3, 1), (6, 1002), (5, 997), (2, 500)]:
        single = exponential_noise(11, 2, int(positions[row]), int(tokens[column]))
        assert single.item() == grid[row, column].item()
    assert grid[:, 3::7].equal(exponential_noise(11, 2, positions[:, None], tokens[3::7]))
    assert grid.T.equal(exponential_noise(11, 2, positions, tokens[:, None]))
    seeds, choices = torch.full((7, 1), 11), torch.full((7, 1003), 2)
    assert grid.equal(exponential_noise(seeds, choices, positions[:, None].expand(7, 1003), tokens))


def test_does_not_write_to_its_arguments() -> None:
    arguments = [torch.arange(5) for _ in range(4)]
    exponential_noise(arguments[0], arguments[1], arguments[2], arguments[3])
    assert all(argument.equal(torch.arange(5)) for argument in arguments)


def test_logarithm_is_within_two_ulp_and_finite_on_the_open_interval() -> None:
    generator = np.random.default_rng(0)
    extremes = [
        2.0**-53,
        3 * 2.0**-53,
        0.5,
        math.nextafter(0.5, 0),
        math.sqrt(0.5),
        1 - 2.0**-53,
        1 - 3 * 2.0**-53,
    ]
    u = np.concatenate([extremes, generator.random(100_000), 1 - generator.random(10_000) * 1e-9])
    u = u[(u > 0) & (u < 1)]
    result = portable_log(torch.from_numpy(u)).numpy()
    expected = np.array([math.log(x) for x in u])
    assert np.all(np.abs(result - expected) <= 2 * np.spacing(np.abs(expected)))
    assert np.all(np.isfinite(result))
    assert np.all(result < 0)


AXES = {
    "seeds": lambda n: uniforms(torch.arange(n), 0, 0, 0),
    "high seeds": lambda n: uniforms(torch.arange(n) << 40, 0, 0, 0),
    "choices": lambda n: uniforms(7, torch.arange(n), 0, 0),
    "positions": lambda n: uniforms(7, 0, torch.arange(n), 0),
    "tokens": lambda n: uniforms(7, 0, 0, torch.arange(n)),
    "diagonal": lambda n: uniforms(torch.arange(n), torch.arange(n), torch.arange(n), torch.arange(n)),
    "antidiagonal": lambda n: uniforms(7, 0, torch.arange(n), torch.arange(n).flip(0)),
}
"""u along one counter; neighbours in these arrays are neighbours in that counter."""


@pytest.mark.parametrize("axis", AXES)
def test_is_uniform_along_every_counter(axis: str) -> None:
    u = AXES[axis](200_000)
    counts = np.bincount((u * 256).astype(int), minlength=256)
    assert stats.chisquare(counts).pvalue > LEAST_P_VALUE
    assert stats.kstest(-np.log(u), "expon").pvalue > LEAST_P_VALUE


@pytest.mark.parametrize("lag", [1, 2, 64, 4096])
@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_independent(axis: str, lag: int) -> None:
    """χ² of the joint distribution of u and its neighbour over 16 × 16 cells."""
    cells = (AXES[axis](200_000) * 16).astype(int)
    joint = np.bincount(cells[:-lag] * 16 + cells[lag:], minlength=256)
    assert stats.chisquare(joint).pvalue > LEAST_P_VALUE


@pytest.mark.parametrize("counter", range(4))
def test_counters_are_independent_of_each_other(counter: int) -> None:
    """u at one (seed, choice, position, token) against u with one counter one higher, over a grid of all."""
    grid = [
        torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate([20, 5, 50, 40])
    ]
    one = (uniforms(*grid) * 16).astype(int).ravel()
    moved = [x + (axis == counter) for axis, x in enumerate(grid)]
    joint = np.bincount(one * 16 + (uniforms(*moved) * 16).astype(int).ravel(), minlength=256)
    assert stats.chisquare(joint).pvalue > LEAST_P_VALUE


def test_every_bit_is_fair_and_turned_by_every_bit_of_every_counter() -> None:
    base = [
        torch.arange(4096) * 7919,
        torch.arange(4096) % 5,
        torch.arange(4096),
        torch.arange(4096) * 31 % 49152,
    ]

    def bits(arguments: list[torch.Tensor]) -> npt.NDArray[np.int64]:
        u = uniforms(*arguments)
        return ((u[:, None] * 2.0 ** np.arange(1, 25)).astype(np.int64) & 1).astype(np.int64)

    plain = bits(base)
    assert np.abs(plain.mean(axis=0) - 0.5).max() < 5 * 0.5 / math.sqrt(4096)
    for counter, width in enumerate([64, 4, 20, 18]):
        for bit in range(width):
            flipped = [x ^ to_int64(1 << bit) if axis == counter else x for axis, x in enumerate(base)]
            turned = (bits(flipped) != plain).mean(axis=0)
            assert np.abs(turned - 0.5).max() < 6 * 0.5 / math.sqrt(4096)
