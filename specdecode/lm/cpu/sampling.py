"""The compiled passes over the vocabulary as functions of tensors; each says what its reference is."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdecode.types import SamplingParams

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


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
        self._leading = _declare(loaded["leading_tokens"], _POINTER, *[_LONG] * 3, *[_POINTER] * 2)
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
        temperature = torch.tensor([params.temperature for params in row_params])
        top_k = torch.tensor([params.top_k for params in row_params])
        top_p = torch.tensor(
            [params.top_p if params.top_p < 1 else torch.inf for params in row_params], dtype=torch.float64
        )
        min_p = torch.tensor([params.min_p for params in row_params])
        self._probabilities[logits.dtype](
            *(logits.data_ptr(), rows, logits.stride(0), size, temperature.data_ptr(), top_k.data_ptr()),
            *(top_p.data_ptr(), min_p.data_ptr(), p.data_ptr()),
        )
        return p

    def leading(
        self,
        p: Tensor,  # [R, V] float32, contiguous
        k: int,
    ) -> tuple[Tensor, Tensor]:
        """The k ≤ V most probable tokens of every row, the lowest id first among equals: ids and p [R, k].

        A row of NaN gives NaN, of any ids.
        """
        rows, size = p.shape
        token_ids = torch.empty(rows, k, dtype=torch.int64)
        probs = torch.empty(rows, k)
        self._leading(p.data_ptr(), rows, size, k, token_ids.data_ptr(), probs.data_ptr())
        return token_ids, probs

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


def _declare(function: ctypes._NamedFuncPointer, *arguments: type) -> ctypes._NamedFuncPointer:
    function.argtypes, function.restype = arguments, None
    return function
