"""Paged attention as transformers sees it: one function behind its attention interface.

All sequences' tokens of a step lie in one row `[1, n]`. An `AttentionPlan`, made once a step and passed
through the model as a keyword, says where each token's keys and values are stored and which blocks each token
may look at. The reference implementation, in torch, for CPU and CUDA, gathers sequences of similar shape
into one dense batch; on a CPU short windows run on a compiled kernel (`specdecode.lm.cpu`) that is tested
against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from specdecode.lm.cpu.kernels import Kernels

ATTENTION_NAME = "specdecode_paged"
PLAN_KEYWORD = "paged_attention_plan"
LONGEST_WINDOW = 64
"""Tokens of one sequence up to which attention over the blocks in place is faster than a dense batch."""


@dataclass(frozen=True)
class Span:
    """One sequence's part of a step: `num_tokens` tokens at positions from `start` on."""

    block_table: Sequence[int]
    start: int
    num_tokens: int


class PagedKV:
    """Keys and values of every layer, by block.

    Attributes:
        keys, values: one tensor a layer, [num_blocks, block_size, kv_heads, head_dim].
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size

        def make(heads: int, dim: int) -> Tensor:
            return torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype, device=device)

        self.keys = [make(shape.kv_heads, shape.key_dim) for shape in layers]
        self.values = [make(shape.kv_heads, shape.value_dim) for shape in layers]


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for a token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers stored for one token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass
class _Group:
    """Sequences of similar shape, padded to one dense batch of B sequences, Q queries and K keys."""

    queries: Tensor
    """[B, Q] int64: index into the step's tokens; padding repeats the first."""
    real: Tensor | None
    """[B * Q] bool: which of the queries are real; None when all are."""
    blocks: Tensor
    """[B * K / block_size] int64; padding repeats the sequence's own first block."""
    query_positions: Tensor
    """[B, Q] int64; padding has the position of the first query."""
    stale: Tensor
    """[B, 1, K, 1] bool: keys beyond a sequence's last token, of whoever had the block before."""
    num_keys: int
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeat: int) -> Tensor:
        """[B, 1, repeat * Q, K] bool: keys at or before each query, with a window fewer than that back."""
        mask = self.masks.get((window, repeat))
        if mask is None:
            keys = torch.arange(self.num_keys, device=self.query_positions.device)
            distance = self.query_positions[:, :, None] - keys
            mask = distance >= 0
            if window is not None:
                mask &= distance < window
            mask = mask.repeat(1, repeat, 1)[:, None]
            self.masks[window, repeat] = mask
        return mask


class AttentionPlan:
    """Where a step's tokens store their KV and what they attend to.

    Attributes:
        windows: [S, 4] int32 spans of few tokens and [T] int32 their block tables, as the kernel reads them.

    Args:
        kv: the storage.
        spans: each sequence's part of the step, in the order of the flattened tokens.
        device: where the model runs.
        kernels: for spans of few tokens; longer ones, and all without, are gathered into dense batches.
    """

    def __init__(
        self, kv: PagedKV, spans: Sequence[Span], device: torch.device, kernels: Kernels | None = None
    ) -> None:
        self.kv = kv
        self._kernels = kernels
        slots: list[int] = []
        positions: list[int] = []
        members: dict[tuple[int, int], list[tuple[int, Span]]] = {}
        windows: list[tuple[int, Span]] = []
        size = kv.block_size
        for span in spans:
            first, end, table = len(slots), span.start + span.num_tokens, span.block_table
            slots += [table[p // size] * size + p % size for p in range(span.start, end)]
            positions += range(span.start, end)
            if kernels is not None and span.num_tokens <= LONGEST_WINDOW:
                windows.append((first, span))
            else:
                # Padding at most doubles either side of the dense batch.
                shape = (span.num_tokens.bit_length(), (-(-end // size)).bit_length())
                members.setdefault(shape, []).append((first, span))
        self.positions = torch.tensor(positions, device=device)
        self.slots = torch.tensor(slots, device=device)
        self._groups = [_group(spans_of, size, device) for spans_of in members.values()]
        self.windows = _windows(windows, size) if windows else None

    @property
    def has_windows_alone(self) -> bool:
        """Whether every span is short enough for the kernel."""
        return self.windows is not None and not self._groups

    def store(
        self,
        key: Tensor,  # [n, kv_heads, key_dim]
        value: Tensor,  # [n, kv_heads, value_dim]
        keys: Tensor,  # [num_blocks, block_size, kv_heads, key_dim]
        values: Tensor,  # [num_blocks, block_size, kv_heads, value_dim]
    ) -> None:
        """Puts the step's keys and values of one layer where they belong."""
        keys.flatten(0, 1)[self.slots] = key
        values.flatten(0, 1)[self.slots] = value

    def attend(
        self,
        tokens: Tensor,  # [n, heads, key_dim]
        keys: Tensor,  # [num_blocks, block_size, kv_heads, key_dim]
        values: Tensor,  # [num_blocks, block_size, kv_heads, value_dim]
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """What every token of the step attends to, after `store`: [n, heads, value_dim]."""
        output = tokens.new_empty(tokens.shape[0], tokens.shape[1], values.shape[-1])
        if self.windows is not None and self._kernels is not None:
            scale = tokens.shape[-1] ** -0.5 if scaling is None else scaling
            spans, tables = self.windows
            self._kernels.attend(
                tokens.contiguous(), keys, values, output, spans, tables, scale, window, softcap
            )
        for group in self._groups:
            attended = _attend(group, tokens, keys, values, scaling, window, softcap).flatten(0, 1)
            index = group.queries.flatten()
            if group.real is not None:
                index, attended = index[group.real], attended[group.real]
            output[index] = attended
        return output


def _windows(members: Sequence[tuple[int, Span]], block_size: int) -> tuple[Tensor, Tensor]:
    """[S, 4] int32 spans and [T] int32 block tables as the kernel reads them."""
    rows: list[tuple[int, int, int, int]] = []
    tables: list[int] = []
    for first, span in members:
        rows.append((first, span.start, span.num_tokens, len(tables)))
        tables += span.block_table[: -(-(span.start + span.num_tokens) // block_size)]
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(tables, dtype=torch.int32)


def _group(members: Sequence[tuple[int, Span]], block_size: int, device: torch.device) -> _Group:
    num_queries = max(span.num_tokens for _, span in members)
    num_blocks = max(-(-(span.start + span.num_tokens) // block_size) for _, span in members)
    queries, positions, real, blocks, ends = [], [], [], [], []
    for first, span in members:
        padding = num_queries - span.num_tokens
        queries.append([*range(first, first + span.num_tokens), *[first] * padding])
        positions.append([*range(span.start, span.start + span.num_tokens), *[span.start] * padding])
        real += [True] * span.num_tokens + [False] * padding
        used = span.block_table[: -(-(span.start + span.num_tokens) // block_size)]
        blocks += [*used, *[used[0]] * (num_blocks - len(used))]
        ends.append(span.start + span.num_tokens)
    num_keys = num_blocks * block_size
    stale = torch.arange(num_keys, device=device) >= torch.tensor(ends, device=device)[:, None]
    return _Group(
        queries=torch.tensor(queries, device=device),
        real=None if all(real) else torch.tensor(real, device=device),
        blocks=torch.tensor(blocks, device=device),
        query_positions=torch.tensor(positions, device=device),
        stale=stale[:, None, :, None],
        num_keys=num_keys,
    )


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, n, key_dim]
    key: Tensor,  # [1, kv_heads, n, key_dim]
    value: Tensor,  # [1, kv_heads, n, value_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stores the step's keys and values and attends over the blocks each sequence owns.

    Returns:
        [1, n, heads, value_dim], and None for the weights.

    Raises:
        NotImplementedError: the model has attention sinks.
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks")
    plan = kwargs[PLAN_KEYWORD]
    layer = module.layer_idx
    keys, values = plan.kv.keys[layer], plan.kv.values[layer]
    plan.store(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values)
    attended = plan.attend(query[0].transpose(0, 1), keys, values, scaling, sliding_window, softcap)
    return attended[None], None


def _attend(
    group: _Group,
    tokens: Tensor,  # [n, heads, key_dim]
    keys: Tensor,  # [num_blocks, block_size, kv_heads, key_dim]
    values: Tensor,  # [num_blocks, block_size, kv_heads, value_dim]
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[B, Q, heads, value_dim]."""
    batch, num_queries = group.queries.shape
    heads, kv_heads = tokens.shape[1], keys.shape[2]
    repeat = heads // kv_heads
    # Heads that share keys become further queries of the same keys, so nothing is repeated.
    query = tokens[group.queries].view(batch, num_queries, kv_heads, repeat, -1)
    query = query.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, repeat * num_queries, -1)
    key = keys.index_select(0, group.blocks).view(batch, group.num_keys, kv_heads, -1).transpose(1, 2)
    value = values.index_select(0, group.blocks).view(batch, group.num_keys, kv_heads, -1).transpose(1, 2)
    # Masked keys still take part, as 0 · value: what an earlier owner left may be NaN.
    key, value = key.masked_fill(group.stale, 0), value.masked_fill(group.stale, 0)
    mask = group.mask(window, repeat)
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    else:
        out = _softcapped(query, key, value, mask, scaling, softcap)
    out = out.view(batch, kv_heads, repeat, num_queries, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, num_queries, heads, -1)


def _softcapped(
    query: Tensor,  # [B, kv_heads, Q, key_dim]
    key: Tensor,  # [B, kv_heads, K, key_dim]
    value: Tensor,  # [B, kv_heads, K, value_dim]
    mask: Tensor,  # [B, 1, Q, K] bool
    scaling: float | None,
    softcap: float,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh((query @ key.transpose(2, 3)) * scale / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The plan holds the masks; the model need not make one."""


def register_attention() -> None:
    """Makes `ATTENTION_NAME` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
