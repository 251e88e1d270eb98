"""The compiled passes over the vocabulary give what their references in torch give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode.lm.cpu import SamplingKernels, load_kernels
from specdecode.noise import coupled_tokens
from specdecode.sampling import Window, probabilities
from specdecode.types import SamplingParams
from specdecode.verification import Drafts, residual_tokens, verify_block, verify_rejection

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels() -> SamplingKernels:
    loaded = load_kernels(torch.float32)
    assert loaded is not None, "the kernels can't be compiled here"
    return loaded.sampling


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def windows(params: SamplingParams, rows: int) -> list[Window]:
    return [Window(params, [0], 1) for _ in range(rows)]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The same support, and the same probabilities on it."""
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected, atol=1e-7, rtol=3e-6)


TRANSFORMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=2.5, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=30.0, top_p=0.999),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=40),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.8),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.2),
    SamplingParams(temperature=5.0, top_k=1000),
    SamplingParams(temperature=1.0, top_k=100_000),
    SamplingParams(temperature=1e-5, top_p=0.9),
]
each_transform = pytest.mark.parametrize(
    "params", TRANSFORMS, ids=lambda p: f"t{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}"
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "params", TRANSFORMS, ids=lambda p: f"t{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}"
)
@pytest.mark.parametrize("size", [5, 64, 1003, 20_000])
def test_probabilities(
    kernels: SamplingKernels, dtype: torch.dtype, params: SamplingParams, size: int
) -> None:
    logits = (4 * noise(7, size + 3)).to(dtype)[:, :size]
    assert_same(probabilities(logits, windows(params, 7), kernels), probabilities(logits, windows(params, 7)))


def test_every_row_has_its_own_transforms_and_is_the_same_alone(kernels: SamplingKernels) -> None:
    logits = 3 * noise(len(TRANSFORMS), 3000)
    each = [Window(params, [0], 1) for params in TRANSFORMS]
    together = probabilities(logits, each, kernels)
    assert_same(together, probabilities(logits, each))
    for row, window in enumerate(each):
        assert torch.equal(probabilities(logits[row : row + 1], [window], kernels)[0], together[row])


@pytest.mark.parametrize(
    "params", TRANSFORMS, ids=lambda p: f"t{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}"
)
def test_ties_go_to_the_lowest_ids(kernels: SamplingKernels, params: SamplingParams) -> None:
    logits = torch.randint(0, 6, (9, 500), generator=torch.Generator().manual_seed(3)).float()
    assert_same(probabilities(logits, windows(params, 9), kernels), probabilities(logits, windows(params, 9)))


@pytest.mark.parametrize(
    "params", TRANSFORMS, ids=lambda p: f"t{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}"
)
def test_what_is_forbidden_has_no_mass(kernels: SamplingKernels, params: SamplingParams) -> None:
    logits = noise(4, 300)
    logits[:, 10:] = -torch.inf
    p = probabilities(logits, windows(params, 4), kernels)
    assert_same(p, probabilities(logits, windows(params, 4)))
    assert not p[:, 10:].any()


@pytest.mark.parametrize(
    "params", TRANSFORMS, ids=lambda p: f"t{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}"
)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_is_no_distribution_and_harms_no_other(
    kernels: SamplingKernels, params: SamplingParams, broken: float
) -> None:
    logits = noise(3, 200)
    whole = probabilities(logits, windows(params, 3), kernels)
    if broken == -torch.inf:
        logits[1] = broken
    else:
        logits[1, 7] = broken
    p = probabilities(logits, windows(params, 3), kernels)
    assert p[1].isnan().any()
    assert torch.equal(p[[0, 2]], whole[[0, 2]])
    assert 0 <= int(coupled_tokens(p, [1] * 3, [0] * 3, [4] * 3, kernels)[1]) < 200
    rows, u = torch.arange(3), torch.full((3,), 0.5)
    nothing = torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0)
    assert 0 <= int(kernels.residual_tokens(p, rows, torch.ones(3), *nothing, u)[1]) < 200


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 6.0])
def test_coupled_picks_are_the_same_tokens(kernels: SamplingKernels, sharpness: float) -> None:
    p = torch.softmax(sharpness * noise(300, 2000), dim=1)
    p[:, 1::3] = 0.0
    p[0] = 0.0
    seeds, choices, positions = range(2**64 - 300, 2**64), [i % 3 for i in range(300)], range(300)
    arguments = (list(seeds), choices, list(positions))
    expected = coupled_tokens(p, *arguments)
    assert torch.equal(coupled_tokens(p, *arguments, kernels)[1:], expected[1:])
    assert len(set(expected.tolist())) > 10


def test_equal_races_go_to_the_lowest_id(kernels: SamplingKernels) -> None:
    """A probability that underflows to an infinite score loses against nobody but those of less."""
    p = torch.zeros(1, 100)
    p[0, [70, 90]] = 1e-45
    keys = torch.tensor([5])
    assert int(kernels.coupled_tokens(p, keys)) in (70, 90)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_residual_samples(kernels: SamplingKernels, scale: float) -> None:
    p = torch.softmax(2 * noise(40, 1000), dim=1)
    p[:, ::7] = 0.0
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 40, (500,), generator=generator)
    support = torch.stack([torch.randperm(1000, generator=generator)[:20] for _ in range(500)])
    q = torch.softmax(3 * noise(500, 20, seed=2), dim=1).double()
    q[::3] = 0.0
    support[::3] = 0
    u = torch.rand(500, dtype=torch.float64, generator=generator)
    u[0], u[1] = 0.0, 1.0 - 2**-53
    scales = torch.full((500,), scale, dtype=torch.float64)
    expected = residual_tokens(p, rows, scales, support, q, u)
    assert torch.equal(kernels.residual_tokens(p, rows, scales, support, q, u), expected)
    assert (p[rows, expected] > 0).all()


def test_a_residual_of_nothing_is_p(kernels: SamplingKernels) -> None:
    p = torch.tensor([[0.0, 0.25, 0.75, 0.0]])
    ids, q, ones = torch.tensor([[1, 2, 0]]), torch.tensor([[0.25, 0.75, 0.0]]), torch.ones(1)
    for u, token in ((0.0, 1), (0.2499, 1), (0.25, 2), (0.999, 2)):
        arguments = (p, torch.zeros(1, dtype=torch.int64), ones, ids, q, torch.tensor([u]))
        assert int(kernels.residual_tokens(*arguments)) == int(residual_tokens(*arguments)) == token


@settings(deadline=None)
@given(st.data())
def test_verification_is_the_same_with_them(data: st.DataObject) -> None:
    loaded = load_kernels(torch.float32)
    assert loaded is not None
    seed = data.draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    batch, longest, size, support = 5, data.draw(st.integers(0, 4)), data.draw(st.integers(2, 200)), 2
    lengths = torch.randint(0, longest + 1, (batch,), generator=generator)
    first_row = torch.cumsum(lengths + 1, 0) - lengths - 1
    p = torch.softmax(2 * torch.randn(int((lengths + 1).sum()), size, generator=generator), dim=1)
    ids = [torch.randperm(size, generator=generator)[:support] for _ in range(batch * longest)]
    q_ids = torch.stack(ids) if ids else torch.zeros(0, support, dtype=torch.int64)
    q_ids = q_ids.view(batch, longest, support)
    q = torch.softmax(torch.randn(batch, longest, support, generator=generator), dim=2)
    picks = torch.randint(0, support, (batch, longest, 1), generator=generator)
    drafts = Drafts(q_ids.gather(2, picks)[:, :, 0], lengths, q_ids, q)
    accept = torch.rand(batch, longest, dtype=torch.float64, generator=generator)
    sample = torch.rand(batch, dtype=torch.float64, generator=generator)
    rules: tuple[Callable[..., object], ...] = (verify_rejection, verify_block)
    for rule in rules:
        plain = rule(p, first_row, drafts, accept, sample)
        fused = rule(p, first_row, drafts, accept, sample, loaded.sampling.residual_tokens)
        for name in ("accepted", "next_token", "tested", "passed"):
            assert torch.equal(getattr(plain, name), getattr(fused, name)), name
