"""Counter-based noise and the Gumbel-coupled picks made with it.

A request with a seed draws all its noise from a hash of (seed, choice index, absolute position, token).
Target and draft evaluate the same exponentials e = −log u, and each picks argmin e / prob over its own
support, which samples from its own distribution (an exponential race; the Gumbel-max trick, Maddison et al.
2014) and makes the two picks agree often: Pr[match] = Σ_j 1 / Σ_i max(p_i/p_j, q_i/q_j). As the target's pick
is what is emitted, the output is a function of the target and the noise alone (Daliri, Musco & Suresh 2024,
"Coupling without communication and drafter-invariant speculative decoding").

The hash, u and e are made of wrapping integer arithmetic and correctly rounded float64 operations only, so
that they are the same bits on every device and in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdecode.lm.cpu.sampling import SamplingKernels

Integers = torch.Tensor | Sequence[int]
"""Integers, one per row: an int64 tensor, or Python ints (seeds up to 2**64 - 1)."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LN2_HIGH = 6.93147180369123816490e-01
"""The leading 33 bits of ln 2: its product with an exponent is exact."""
_LN2_LOW = 1.90821492927058770002e-10
_SERIES = tuple(2.0 / (2 * n + 1) for n in range(12))
"""2·atanh(s)/s in powers of s²; the rest is below 1e-18 for |s| ≤ 3 − 2·√2."""
_CACHE_ELEMENTS = 1 << 16
"""Entries of p handled at once on a CPU: the passes over them then stay in its cache."""
_NEAR_MINIMUM = 1.0 + 1e-9
"""Factor on the approximate minimum within which the exact minimum must lie (torch.log is good to 1e-15)."""


def to_int64(value: int) -> int:
    """The int64 with the same 64 bits as `value` mod 2**64 (how unsigned seeds enter int64 tensors)."""
    return ((value + (1 << 63)) % (1 << 64)) - (1 << 63)


def exponential_noise(
    seed: int | torch.Tensor,
    choice_index: int | torch.Tensor,
    position: int | torch.Tensor,
    token: int | torch.Tensor,
) -> torch.Tensor:
    """e = −log u, one standard exponential for each (seed, choice index, absolute position, token).

    Arguments are Python ints (seeds unsigned, up to 2**64 − 1) or int64 tensors, broadcast against each
    other.

    Returns:
        float64 tensor of the broadcast shape, finite and > 0.
    """
    arguments = (seed, choice_index, position, token)
    device = next((x.device for x in arguments if isinstance(x, torch.Tensor)), None)
    *row, tokens = (_as_tensor(x, device) for x in arguments)
    return -portable_log(_uniform(_row_keys(*row), tokens))


def coupled_tokens(
    p: torch.Tensor,  # [R, V]
    seeds: Integers,  # [R]
    choice_indices: Integers,  # [R]
    positions: Integers,  # [R]
    kernels: SamplingKernels | None = None,
) -> torch.Tensor:
    """The pick argmin e / p of every row, over the row's support (p > 0); ties go to the lowest id.

    `positions` are absolute: the number of tokens before the row's own, prompt included. A row without
    support (NaN) gets some id of the vocabulary.

    Returns:
        [R] int64.
    """
    keys = _keys_of(seeds, choice_indices, positions, p.device)
    if kernels is not None and p.dtype == torch.float32:
        return kernels.coupled_tokens(p, keys)
    part_rows = max(1, _CACHE_ELEMENTS // p.shape[1]) if p.device.type == "cpu" else max(1, len(p))
    picks = []
    for part, part_keys in zip(torch.split(p, part_rows), torch.split(keys, part_rows), strict=True):
        support = part > 0
        rows, token_ids = support.nonzero(as_tuple=True)
        u = _uniform(part_keys[rows], token_ids)
        picks.append(race_winners(u, part[support], rows, token_ids, len(part)))
    return torch.cat(picks).clamp_(max=p.shape[1] - 1)


def coupled_support_tokens(
    token_ids: torch.Tensor,  # [R, K]
    probs: torch.Tensor,  # [R, K]
    seeds: Integers,  # [R]
    choice_indices: Integers,  # [R]
    positions: Integers,  # [R]
) -> torch.Tensor:
    """`coupled_tokens` for distributions given by their support (entries with probability 0 are padding).

    Returns:
        [R] int64 token ids.
    """
    support = probs > 0
    rows, support_ids = support.nonzero()[:, 0], token_ids[support].long()
    u = _uniform(_keys_of(seeds, choice_indices, positions, probs.device)[rows], support_ids)
    return race_winners(u, probs[support], rows, support_ids, len(probs))


def race_winners(
    u: torch.Tensor,  # [N] float64 in (0, 1)
    probs: torch.Tensor,  # [N] > 0
    rows: torch.Tensor,  # [N] int64
    token_ids: torch.Tensor,  # [N] int64
    num_rows: int,
) -> torch.Tensor:
    """The token of least −log(u) / prob among each row's entries, the lowest of equals: [num_rows] int64.

    For independent uniform u a row's winner is distributed as its probs / Σ probs. A row without entries gets
    the largest int64.
    """
    probs = probs.double()
    # A first pass with the device's own logarithm leaves the few tokens that the exact one has to separate.
    approximate = torch.log(u).neg_().div_(probs)
    limits = _row_minima(approximate, rows, num_rows) * _NEAR_MINIMUM
    near = (approximate <= limits[rows]).nonzero()[:, 0]
    rows, token_ids = rows[near], token_ids[near]
    scores = -portable_log(u[near]) / probs[near]
    best = scores == _row_minima(scores, rows, num_rows)[rows]
    winners = torch.full((num_rows,), torch.iinfo(torch.int64).max, device=u.device)
    return winners.scatter_reduce_(0, rows[best], token_ids[best], "amin")


def portable_log(u: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of float64 u > 0, within 2 ulp, the same bits on every device.

    It is made of correctly rounded operations only; the logarithms of libraries differ in their last bit.
    u = 2^k · m with m in [√½, √2); log m = 2·atanh(s), s = (m − 1)/(m + 1).
    """
    mantissa, exponent = torch.frexp(u)
    low = mantissa < 0.7071067811865476
    mantissa = torch.where(low, mantissa * 2, mantissa)
    k = exponent.double() - low.double()
    s = (mantissa - 1) / (mantissa + 1)
    z = s * s
    series = torch.full_like(z, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        series = series * z + coefficient
    return k * _LN2_HIGH + (s * series + k * _LN2_LOW)


def _keys_of(
    seeds: Integers, choice_indices: Integers, positions: Integers, device: torch.device
) -> torch.Tensor:
    return _row_keys(*(_integer_column(x, device) for x in (seeds, choice_indices, positions)))  # [R]


def _integer_column(values: Integers, device: torch.device) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.to(device=device, dtype=torch.int64)
    return torch.tensor([to_int64(value) for value in values], dtype=torch.int64, device=device)


def _as_tensor(value: int | torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(torch.int64)
    return torch.tensor(to_int64(value), dtype=torch.int64, device=device)


def _row_keys(seed: torch.Tensor, choice_index: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One 64-bit state per (seed, choice index, position); a bijection of each when the others are fixed."""
    key = _mix(seed + to_int64(_GOLDEN))
    key = _mix(key + (choice_index + 1) * to_int64(_GOLDEN))
    return _mix(key + (position + 1) * to_int64(_GOLDEN))


def _uniform(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """u in the open (0, 1): 52 high bits, plus a half, of output `token_id` of splitmix64 at state `key`."""
    bits = _mix(((token_ids + 1) * to_int64(_GOLDEN)) + keys)
    return _shifted_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64 (Steele, Lea & Flood 2014), in int64 arithmetic that wraps."""
    z = _shifted_right(z, 30).bitwise_xor_(z).mul_(to_int64(_MIX_1))
    z = _shifted_right(z, 27).bitwise_xor_(z).mul_(to_int64(_MIX_2))
    return _shifted_right(z, 31).bitwise_xor_(z)


def _shifted_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64's own shift copies the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _row_minima(values: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    minima = torch.full((num_rows,), torch.inf, dtype=values.dtype, device=values.device)
    return minima.scatter_reduce_(0, rows, values, "amin")
