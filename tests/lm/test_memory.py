"""How many KV blocks a service makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdecode.config import TargetSettings
from specdecode.errors import FailedPreconditionError
from specdecode.lm.memory import available_bytes, choose_device, choose_num_blocks
from tests.lm.tiny import MAX_LENGTH, paged_model

MIB = 2**20
BLOCK_BYTES = 16 * 4 * 2 * (2 * 2 * 16)
"""16 tokens of float32: two layers, keys and values, two heads of 16."""


def num_blocks(max_sequences: int = 10**6, **options: Any) -> int:
    return choose_num_blocks(paged_model("llama"), TargetSettings(**options), max_sequences)


def test_a_block_holds_the_keys_and_values_of_its_tokens_in_every_layer() -> None:
    assert paged_model("llama").block_bytes(16) == BLOCK_BYTES


def test_memory_is_filled_with_blocks() -> None:
    assert num_blocks(kv_memory=MIB) == MIB // BLOCK_BYTES
    assert num_blocks(kv_memory=MIB, block_size=32) == MIB // (2 * BLOCK_BYTES)


def test_no_more_blocks_than_all_sequences_at_full_length_could_use() -> None:
    assert num_blocks(3, kv_memory=1024 * MIB) == 3 * MAX_LENGTH // 16


def test_a_share_of_the_free_memory_is_taken() -> None:
    free = available_bytes(torch.device("cpu")) // BLOCK_BYTES
    assert 0 < num_blocks(10**9, kv_memory_fraction=0.01) < 0.05 * free


def test_a_stated_number_overrides_memory() -> None:
    assert num_blocks(1, num_blocks=77, kv_memory=MIB) == 77


def test_a_pool_of_less_than_two_blocks_is_refused() -> None:
    with pytest.raises(FailedPreconditionError, match=r"kv_memory: .* hold 0 KV blocks of .* at least 2"):
        num_blocks(0, kv_memory=MIB)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(FailedPreconditionError, match="no GPU"):
        choose_device("cuda")
