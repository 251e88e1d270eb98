"""The compiled passes over the vocabulary as functions of tensors; each says what its reference is."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdecode.types import SamplingParams

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True)
class DraftedRows:
    """One drafted token a row, and the q that it was drawn from.

    Attributes:
        tokens: [R]
        counts: [R] entries of q; 0 where there is no distribution, and then no token.
        token_ids: [R, k] int32, the most probable first.
        q: [R, k] float32
    """

    tokens: list[int]
    counts: list[int]
    token_ids: npt.NDArray[np.int32]
    q: npt.NDArray[np.float32]


class SamplingKernels:
    """Functions of one compiled library, for CPU tensors; p is float32.

    Args:
        library: from `build_library`.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._probabilities = {dtype: loaded[f"probabilities_{name}"] for dtype, name in _SUFFIXES.items()}
        for function in self._probabilities.values():
            _declare(function, _POINTER, *[_LONG] * 3, *[_POINTER] * 5)
        self._drafts = {dtype: loaded[f"draft_tokens_{name}"] for dtype, name in _SUFFIXES.items()}
        for function in self._drafts.values():
            _declare(function, _POINTER, *[_LONG] * 3, *[_POINTER] * 5, _LONG, *[_POINTER] * 6)
        self._residual = _declare(
            loaded["residual_tokens"],
            *(_POINTER, _LONG, *[_POINTER] * 4, _LONG, _POINTER, _LONG, _POINTER),
        )
        self._coupled = _declare(loaded["coupled_tokens"], _POINTER, *[_LONG] * 2, *[_POINTER] * 2)

    def takes(
        self,
        logits: Tensor,  # [R, V]
    ) -> bool:
        """Whether `probabilities` is made for them."""
        return logits.dtype in _SUFFIXES and logits.device.type == "cpu" and logits.stride(1) == 1

    def probabilities(
        self,
        logits: Tensor,  # [R, V], after penalties, bias and bans
        row_params: Sequence[SamplingParams],  # [R]
    ) -> Tensor:
        """Temperature, top-k, top-p, min-p and softmax as `sampling.probabilities`: [R, V] float32."""
        rows, size = logits.shape
        p = torch.empty(rows, size)
        parameters = _parameters(row_params)
        self._probabilities[logits.dtype](
            *(logits.data_ptr(), rows, logits.stride(0), size),
            *(*(parameter.data_ptr() for parameter in parameters), p.data_ptr()),
        )
        return p

    def drafts(
        self,
        logits: Tensor,  # [R, C], after penalties, bias and bans
        row_params: Sequence[SamplingParams],  # [R]
        top_k: int,
        token_ids: Tensor | None,  # [C] int64, what the columns stand for; None: themselves
        noise: Tensor,  # [R] float64 in [0, 1); or [R, 3] int64 seed, choice index, position
    ) -> DraftedRows:
        """Draws from p's `top_k` leading tokens, renormalised, by u or by a race."""
        rows, size = logits.shape
        k = min(top_k, size)
        tokens = torch.zeros(rows, dtype=torch.int64)
        ids = torch.empty(rows, k, dtype=torch.int32)
        q = torch.empty(rows, k)
        counts = torch.empty(rows, dtype=torch.int64)
        parameters = _parameters(row_params)
        is_race = noise.dtype == torch.int64
        self._drafts[logits.dtype](
            *(logits.data_ptr(), rows, logits.stride(0), size),
            None if token_ids is None else token_ids.data_ptr(),
            *(parameter.data_ptr() for parameter in parameters),
            *(k, None if is_race else noise.data_ptr(), noise.data_ptr() if is_race else None),
            *(tokens.data_ptr(), ids.data_ptr(), q.data_ptr(), counts.data_ptr()),
        )
        return DraftedRows(tokens.tolist(), counts.tolist(), ids.numpy(), q.numpy())

    def residual_tokens(
        self,
        p: Tensor,  # [R, V] float32, contiguous
        rows: Tensor,  # [B] int64
        scale: Tensor,  # [B]
        support_ids: Tensor,  # [B, K] int64
        q: Tensor,  # [B, K]
        noise: Tensor,  # [B]
    ) -> Tensor:
        """As `verification.residual_tokens`: [B] int64."""
        scale, q, noise = scale.double().contiguous(), q.double().contiguous(), noise.double().contiguous()
        rows, support_ids = rows.contiguous(), support_ids.contiguous()
        batch, support = q.shape
        tokens = torch.empty(batch, dtype=torch.int64)
        self._residual(
            *(p.data_ptr(), p.shape[1], rows.data_ptr(), scale.data_ptr(), support_ids.data_ptr()),
            *(q.data_ptr(), support, noise.data_ptr(), batch, tokens.data_ptr()),
        )
        return tokens

    def coupled_tokens(
        self,
        p: Tensor,  # [R, V] float32, contiguous
        keys: Tensor,  # [R] int64
    ) -> Tensor:
        """The picks of `noise.coupled_tokens` for its row keys: [R] int64."""
        tokens = torch.empty(len(p), dtype=torch.int64)
        self._coupled(p.data_ptr(), *p.shape, keys.contiguous().data_ptr(), tokens.data_ptr())
        return tokens


def _parameters(row_params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Temperature, top-k, top-p and min-p of each row, [R] each, as the kernels read them."""
    return (
        torch.tensor([params.temperature for params in row_params]),
        torch.tensor([params.top_k for params in row_params]),
        torch.tensor(
            [params.top_p if params.top_p < 1 else torch.inf for params in row_params], dtype=torch.float64
        ),
        torch.tensor([params.min_p for params in row_params]),
    )


def _declare(function: ctypes._NamedFuncPointer, *arguments: type) -> ctypes._NamedFuncPointer:
    function.argtypes, function.restype = arguments, None
    return function
