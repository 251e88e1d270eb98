"""Device, dtype and pool size from settings."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from specdecode.config import ModelServiceSettings
from specdecode.errors import FailedPreconditionError
from specdecode.lm.model import LoadedModel


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one.

    Raises:
        FailedPreconditionError: a GPU is asked for and torch sees none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise FailedPreconditionError("device cuda: torch sees no GPU; use device cpu or auto")
    return torch.device(name)


def available_bytes(device: torch.device) -> int:
    """Memory that could still be taken on the device, within the limit of the control group if there is
    one.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, max(int(limit) - int(used), 0))


def choose_num_blocks(model: LoadedModel, settings: ModelServiceSettings, max_sequences: int) -> int:
    """Blocks of the pool: as set, or what the memory holds, but no more than `max_sequences` full contexts.

    Raises:
        FailedPreconditionError: not even two blocks fit.
    """
    if settings.num_blocks is not None:
        return settings.num_blocks
    size = model.block_bytes(settings.block_size)
    memory = settings.kv_memory or int(available_bytes(model.device) * settings.kv_memory_fraction)
    needed = max_sequences * -(-model.max_length // settings.block_size)
    num_blocks = min(memory // size, needed)
    if num_blocks < 2:
        raise FailedPreconditionError(
            f"kv_memory: {memory} bytes hold {num_blocks} KV blocks of {size} bytes; at least 2 are needed"
        )
    return int(num_blocks)
