"""Logits to p: the one definition of a sampling distribution that target and draft share.

Transforms apply in this order, the same on both sides and at every row: repetition, presence and frequency
penalties → logit bias → allowed, banned and too-early stop ids → temperature → top-k → top-p → min-p →
softmax. Temperature 0 is the one-hot of the greedy pick. Ties always go to the lowest id: in the greedy pick,
in top-k (exactly k survive) and in the order by which top-p takes its prefix.

The history of row i of a window is its committed tokens and its drafts before i. It is counted from the ids
at every call, so no count can be stale or doubled when drafts are rejected. A row's result depends on that
row alone, not on its batch. Logits have exactly the columns that may have mass: padding ids above the
vocabulary are cut off before.

A row that holds NaN, or in which nothing is permitted, gives NaN (and some id of the vocabulary as its
token); other rows are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdecode.lm.cpu.sampling import SamplingKernels
from specdecode.noise import coupled_support_tokens, coupled_tokens, exponential_noise
from specdecode.types import SamplingParams, TokenLogprobs

__all__ = [
    "Window",
    "coupled_support_tokens",
    "coupled_tokens",
    "exponential_noise",
    "greedy_tokens",
    "inverse_cdf",
    "penalised_logits",
    "probabilities",
    "restrict_top_k",
    "token_logprobs",
]

_PARTIAL_SIZES = (64, 1024, 8192)
"""Leading tokens looked at before the whole vocabulary is sorted; few rows need more."""


@dataclass(frozen=True)
class Window:
    """One sequence's len(drafted) + 1 rows in a batch; row i is the position after token_ids + drafted[:i].

    Attributes:
        params: the request's sampling parameters.
        token_ids: committed tokens, prompt then output.
        num_prompt_tokens: how many of them are the prompt.
        drafted: the drafts under verification.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    drafted: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        """Rows of logits that belong to this window."""
        return len(self.drafted) + 1

    @property
    def num_too_early(self) -> int:
        """Leading rows at which the sequence may not end yet (`min_tokens`)."""
        missing = self.params.min_tokens - (len(self.token_ids) - self.num_prompt_tokens)
        return min(max(missing, 0), self.num_rows) if self.params.stop_token_ids else 0

    @property
    def adjusts_logits(self) -> bool:
        """Whether any transform before temperature applies."""
        params = self.params
        restricted = params.allowed_token_ids is not None or bool(params.banned_token_ids)
        return params.has_penalties or bool(params.logit_bias) or restricted or self.num_too_early > 0


def penalised_logits(
    logits: torch.Tensor,  # [R, V]
    windows: Sequence[Window],
) -> torch.Tensor:
    """Logits after penalties, logit bias and the allowed, banned and too-early stop ids: [R, V].

    The repetition penalty r divides a positive logit of a token seen in prompt or output by r and multiplies
    any other by r (Keskar et al. 2019); the frequency penalty is subtracted for every occurrence in the
    output, the presence penalty once. Returns the input itself when no window needs anything; else a float32
    or float64 copy.
    """
    _check_rows(logits, windows)
    if not any(window.adjusts_logits for window in windows):
        return logits
    adjusted = logits.to(_working_dtype(logits), copy=True)
    first_row = 0
    for window in windows:
        if window.adjusts_logits:
            _adjust(adjusted[first_row : first_row + window.num_rows], window)
        first_row += window.num_rows
    return adjusted


def greedy_tokens(
    logits: torch.Tensor,  # [R, V]
    windows: Sequence[Window],
) -> torch.Tensor:
    """The most probable id of every row after `penalised_logits`, the lowest of several: [R] int64."""
    return penalised_logits(logits, windows).max(dim=1).indices


def probabilities(
    logits: torch.Tensor,  # [R, V]
    windows: Sequence[Window],
    kernels: SamplingKernels | None = None,
) -> torch.Tensor:
    """p after all transforms: [R, V], float64 for float64 logits, float32 otherwise.

    Rows are handled in groups that need the same work; a row without truncation costs a softmax. With
    `kernels`, where they take the logits, each is computed alone in a few passes.
    """
    logits = penalised_logits(logits, windows)
    row_params = [window.params for window in windows for _ in range(window.num_rows)]
    if kernels is not None and kernels.takes(logits):
        return kernels.probabilities(logits, row_params)
    logits = logits.to(_working_dtype(logits))
    groups: dict[tuple[_Transform, int], list[int]] = {}
    for row, params in enumerate(row_params):
        groups.setdefault(_transform_of(params, logits.shape[1]), []).append(row)
    if len(groups) == 1:
        ((transform, size),) = groups
        return transform(logits, _Columns.of(row_params, logits), size)
    p = torch.empty_like(logits)
    for (transform, size), rows in groups.items():
        columns = _Columns.of([row_params[row] for row in rows], logits)
        index = torch.tensor(rows, device=logits.device)
        p[index] = transform(logits[index], columns, size)
    return p


def inverse_cdf(
    p: torch.Tensor,  # [R, V]
    u: torch.Tensor,  # [R]
) -> torch.Tensor:
    """The first token whose cumulative mass exceeds u · total, [R] int64: distributed as p / Σp for uniform
    u.

    Sums are float64. u is in [0, 1). A token of probability 0 is never returned, not even where u · total
    rounds up to the total or where a parallel sum is not monotone.
    """
    cumulative = torch.cumsum(p, dim=1, dtype=torch.float64)
    total = cumulative[:, -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(u.double() * total, below_total)
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True).clamp_(max=p.shape[1] - 1)
    # A parallel sum may not be monotone and step by its rounding at a token of probability 0.
    return torch.where(p.gather(1, tokens) > 0, tokens, p.max(dim=1, keepdim=True).indices)[:, 0]


def restrict_top_k(
    p: torch.Tensor,  # [R, V]
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most probable tokens of every row, renormalised: token_ids [R, k] int64, probs [R, k] like p.

    This is the q that a drafter samples from and sends. Entries past the support have probability 0; a
    vocabulary of fewer than k ids gives that many columns.
    """
    token_ids, probs = _leading(p, min(k, p.shape[1]))
    return token_ids, probs / probs.sum(dim=1, keepdim=True)


def token_logprobs(
    raw_logits: torch.Tensor,  # [R, V]
    token_ids: torch.Tensor,  # [R]
    num_top: int,
) -> list[TokenLogprobs]:
    """Logprob and rank of one token per row, and the row's `num_top` best, of logits before transforms."""
    logits = raw_logits.to(_working_dtype(raw_logits))
    logprobs = torch.log_softmax(logits, dim=1)
    own = token_ids.to(logits.device)[:, None]
    level = logits.gather(1, own)
    ahead = (logits == level).logical_and_(torch.arange(logits.shape[1], device=logits.device) < own)
    ranks = 1 + ahead.logical_or_(logits > level).sum(dim=1)
    top_ids, _ = _leading(logits, min(num_top, logits.shape[1]))
    tops = zip(top_ids.tolist(), logprobs.gather(1, top_ids).tolist(), strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, rank, (ids, values) in zip(
            own[:, 0].tolist(), logprobs.gather(1, own)[:, 0].tolist(), ranks.tolist(), tops, strict=True
        )
    ]


def _check_rows(logits: torch.Tensor, windows: Sequence[Window]) -> None:
    num_rows = sum(window.num_rows for window in windows)
    assert logits.ndim == 2, f"logits {tuple(logits.shape)}: expected [R, V]"
    assert logits.shape[0] == num_rows, f"{logits.shape[0]} rows of logits for {num_rows} rows of windows"


def _working_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _adjust(logits: torch.Tensor, window: Window) -> None:
    """Everything before temperature, in place on one window's rows [G + 1, V]."""
    params, device, vocab_size = window.params, logits.device, logits.shape[1]
    if params.has_penalties:
        _penalise(logits, window)
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        bias = torch.tensor(biases, dtype=logits.dtype, device=device)
        logits.index_add_(1, torch.tensor(token_ids, device=device), bias.expand(len(logits), -1))
    if params.allowed_token_ids is not None:
        forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
        forbidden[_ids_within(params.allowed_token_ids, logits)] = False
        logits.masked_fill_(forbidden, -torch.inf)
    if params.banned_token_ids:
        logits.index_fill_(1, _ids_within(params.banned_token_ids, logits), -torch.inf)
    if window.num_too_early:
        logits[: window.num_too_early].index_fill_(1, _ids_within(params.stop_token_ids, logits), -torch.inf)


def _ids_within(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """The ids that have a column; others can't be emitted anyway."""
    known = [token_id for token_id in token_ids if 0 <= token_id < logits.shape[1]]
    return torch.tensor(known, dtype=torch.int64, device=logits.device)


def _penalise(logits: torch.Tensor, window: Window) -> None:
    """Repetition, frequency and presence penalties, in place on one window's rows [G + 1, V]."""
    params = window.params
    token_ids, seen, output = _history_counts(window, logits.device)  # [U], [G + 1, U], [G + 1, U]
    values = logits[:, token_ids]
    repeated = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values = torch.where(seen > 0, repeated, values)
    values -= params.frequency_penalty * output.to(values.dtype)
    values -= params.presence_penalty * (output > 0).to(values.dtype)
    logits[:, token_ids] = values


def _history_counts(window: Window, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ids in a window's history [U]; their counts before each row, in all and in output [G + 1, U]."""
    history = torch.tensor([*window.token_ids, *window.drafted], dtype=torch.int64)
    token_ids, columns = torch.unique(history, return_inverse=True)
    num_committed = len(window.token_ids)
    committed = torch.bincount(columns[:num_committed], minlength=len(token_ids))
    prompt = torch.bincount(columns[: window.num_prompt_tokens], minlength=len(token_ids))
    drafted = torch.zeros(window.num_rows, len(token_ids), dtype=torch.int64)
    drafted[torch.arange(1, window.num_rows), columns[num_committed:]] = 1
    seen = committed + drafted.cumsum(dim=0)
    return token_ids.to(device), seen.to(device), (seen - prompt).to(device)


@dataclass(frozen=True)
class _Columns:
    """The parameters of N rows as [N, 1] columns; transforms that are off have values that change nothing."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, row_params: Sequence[SamplingParams], logits: torch.Tensor) -> _Columns:
        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

        return cls(
            temperature=column([params.temperature for params in row_params], logits.dtype),
            top_k=column([params.top_k or logits.shape[1] for params in row_params], torch.int64),
            top_p=column(
                [params.top_p if params.top_p < 1 else torch.inf for params in row_params], torch.float64
            ),
            min_p=column([params.min_p for params in row_params], logits.dtype),
        )

    def __getitem__(self, rows: torch.Tensor) -> _Columns:
        return _Columns(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


_Transform = Callable[[torch.Tensor, _Columns, int], torch.Tensor]
"""(logits [N, V], columns, size of the leading list) → p [N, V]."""


def _transform_of(params: SamplingParams, vocab_size: int) -> tuple[_Transform, int]:
    """What a row with these parameters needs, and how many leading tokens it needs at first."""
    if params.temperature == 0:
        return _one_hot, 0
    if 0 < params.top_k < vocab_size:
        return _top_k_softmax, next((size for size in _PARTIAL_SIZES if params.top_k <= size), vocab_size)
    if params.top_p < 1:
        return _top_p_softmax, 0
    if params.min_p > 0:
        return _min_p_softmax, 0
    return (_softmax if params.temperature == 1 else _tempered_softmax), 0


def _one_hot(logits: torch.Tensor, columns: _Columns, size: int) -> torch.Tensor:
    best, token_ids = logits.max(dim=1, keepdim=True)  # the first of several
    mass = torch.where(best.isfinite(), 1.0, torch.nan).to(logits.dtype)
    return torch.zeros_like(logits).scatter_(1, token_ids, mass)


def _softmax(logits: torch.Tensor, columns: _Columns, size: int) -> torch.Tensor:
    return torch.softmax(logits, dim=1)


def _tempered_softmax(logits: torch.Tensor, columns: _Columns, size: int) -> torch.Tensor:
    return torch.softmax(_scaled(logits, columns), dim=1)


def _min_p_softmax(logits: torch.Tensor, columns: _Columns, size: int) -> torch.Tensor:
    scaled = _scaled(logits, columns)
    p = torch.softmax(scaled, dim=1)
    dropped = p < columns.min_p * p.amax(dim=1, keepdim=True)
    return torch.softmax(scaled.masked_fill_(dropped, -torch.inf), dim=1)


def _top_k_softmax(logits: torch.Tensor, columns: _Columns, size: int) -> torch.Tensor:
    """Top-k, then top-p and min-p among its survivors."""
    token_ids, values = _leading(logits, min(size, logits.shape[1]))
    scaled = _scaled(values, columns)
    beyond = torch.arange(scaled.shape[1], device=logits.device) >= columns.top_k
    scaled = scaled.masked_fill(beyond, -torch.inf)
    survivors = _nucleus_softmax(scaled, torch.softmax(scaled, dim=1), columns)
    return torch.zeros_like(logits).scatter_(1, token_ids, survivors)


def _top_p_softmax(logits: torch.Tensor, columns: _Columns, size: int) -> torch.Tensor:
    """Top-p of the whole vocabulary (and min-p among its survivors), by ever longer leading lists."""
    p = torch.softmax(_scaled(logits, columns), dim=1)
    vocab_size = p.shape[1]
    pending = torch.arange(len(p), device=p.device)
    for length in (*(size for size in _PARTIAL_SIZES if size < vocab_size), vocab_size):
        token_ids, values = _leading(logits[pending], length)
        masses = p[pending[:, None], token_ids]
        mass = torch.cumsum(masses, dim=1, dtype=torch.float64)[:, -1:]
        enough = (mass >= columns.top_p[pending])[:, 0] | (length == vocab_size)
        done, part = pending[enough], columns[pending[enough]]
        survivors = _nucleus_softmax(_scaled(values[enough], part), masses[enough], part)
        p.index_fill_(0, done, 0.0)
        p[done[:, None], token_ids[enough]] = survivors
        pending = pending[~enough]
        if not len(pending):
            break
    return p


def _nucleus_softmax(scaled: torch.Tensor, masses: torch.Tensor, columns: _Columns) -> torch.Tensor:
    """Top-p and min-p on leading lists [N, S], best first: the probabilities of the survivors, renormalised.

    A token survives top-p iff the mass before it is below top_p, so the first always does.
    """
    before = torch.cumsum(masses, dim=1, dtype=torch.float64).roll(1, dims=1)
    before[:, 0] = 0.0
    dropped = (before >= columns.top_p) | (masses < columns.min_p * masses[:, :1])
    return torch.softmax(scaled.masked_fill(dropped, -torch.inf), dim=1)


def _scaled(values: torch.Tensor, columns: _Columns) -> torch.Tensor:
    """(values − row maximum) / temperature: a tiny temperature can't overflow; a copy."""
    return (values - values.amax(dim=1, keepdim=True)).div_(columns.temperature)


def _leading(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first k ≤ V of every row [N, V] by value descending, then id ascending: ids and values [N, k].

    torch.topk leaves open which of several equal values it takes and in which order; both are settled here.
    """
    vocab_size = values.shape[1]
    if k == vocab_size:
        ordered, token_ids = torch.sort(values, dim=1, descending=True, stable=True)
        return token_ids, ordered
    top, token_ids = torch.topk(values, k + 1, dim=1)
    if k == 0:
        return token_ids[:, :0], top[:, :0]
    boundary = top[:, k - 1]
    straddling = ((boundary == top[:, k]) & (boundary > -torch.inf)).nonzero()[:, 0]
    token_ids, top = token_ids[:, :k], top[:, :k]
    if len(straddling):
        token_ids[straddling] = _with_lowest_ids(
            values[straddling], token_ids[straddling], boundary[straddling]
        )
    if bool((top[:, 1:] == top[:, :-1]).any()):
        token_ids, order = token_ids.sort(dim=1)
        top, order = top.gather(1, order).sort(dim=1, descending=True, stable=True)
        token_ids = token_ids.gather(1, order)
    return token_ids, top


def _with_lowest_ids(
    values: torch.Tensor,  # [N, V]
    token_ids: torch.Tensor,  # [N, k], best first
    boundary: torch.Tensor,  # [N], the smallest value kept
) -> torch.Tensor:
    """`token_ids` with those at the boundary value replaced by the lowest ids that have this value."""
    rows, tied_ids = (values == boundary[:, None]).nonzero(as_tuple=True)  # row-major
    counts = torch.bincount(rows, minlength=len(values))
    rank = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    num_above = (values.gather(1, token_ids) > boundary[:, None]).sum(dim=1)
    column = num_above[rows] + rank
    kept = column < token_ids.shape[1]
    token_ids = token_ids.clone()
    token_ids[rows[kept], column[kept]] = tied_ids[kept]
    return token_ids
