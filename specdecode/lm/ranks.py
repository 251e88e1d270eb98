"""Processes that run one model together: rank 0 leads, the others do what it says.

A step's plan (tokens, rows, block tables) goes out in one small broadcast; the model's own products are
summed and gathered inside the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specdecode.errors import UnavailableError
from specdecode.lm.attention import Span

_MEETING_SECONDS = 600.0
_FOREVER = timedelta(days=365)
"""Ranks wait for the next step as long as nobody asks; a rank that is lost closes its connections."""
_FIRST_NUMBERS = 2048
"""Of a plan, sent at once; a longer one takes a second broadcast."""
_STOP = -1


@dataclass(frozen=True)
class StepPlan:
    """What every rank runs in one step.

    Attributes:
        spans: each sequence's part.
        token_ids: of all spans, one after another.
        rows: tokens that need logits.
    """

    spans: Sequence[Span]
    token_ids: Sequence[int]
    rows: Sequence[int]

    def numbers(self) -> list[int]:
        """As integers."""
        numbers = [len(self.spans), len(self.token_ids), len(self.rows), *self.token_ids, *self.rows]
        for span in self.spans:
            numbers += (span.start, span.num_tokens, len(span.block_table), *span.block_table)
        return numbers

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> StepPlan:
        """What `numbers` gave."""
        num_spans, num_tokens, num_rows = numbers[:3]
        end = 3 + num_tokens
        token_ids, rows = numbers[3:end], numbers[end : end + num_rows]
        end += num_rows
        spans = []
        for _ in range(num_spans):
            start, tokens, blocks = numbers[end : end + 3]
            spans.append(Span(numbers[end + 3 : end + 3 + blocks], start, tokens))
            end += 3 + blocks
        return cls(spans, token_ids, rows)


@dataclass(frozen=True)
class Ranks:
    """The group of processes that this one belongs to; use `meet`.

    Attributes:
        rank: this process, from 0.
        size: of the group.
        plans: group in which plans are sent, between CPUs.
    """

    rank: int
    size: int
    plans: Any

    @classmethod
    def meet(cls, rank: int, size: int, address: str, device: torch.device) -> Ranks:
        """Waits for all ranks at `address` (host:port), where rank 0 listens.

        Raises:
            UnavailableError: they do not meet.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            host, port = address.rsplit(":", 1)
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), size, is_master=rank == 0, timeout=timedelta(seconds=_MEETING_SECONDS)
            )
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_FOREVER)
            is_gloo = backend == "gloo"
            plans = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo", timeout=_FOREVER)
        except (RuntimeError, ValueError) as error:
            where = f"rank {rank} of {size} did not meet the others at {address}"
            raise UnavailableError(f"{where}: {error}") from None
        return cls(rank, size, plans)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def send(self, plan: StepPlan) -> None:
        """Rank 0 tells the others what to run."""
        self._broadcast(plan.numbers())

    def stop(self) -> None:
        """Rank 0 lets the others end."""
        self._broadcast([_STOP])

    def receive(self) -> StepPlan | None:
        """What rank 0 tells next; None: to end."""
        numbers = self._broadcast(None)
        return None if numbers[0] == _STOP else StepPlan.of_numbers(numbers)

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        value = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self.plans)
        return int(value)

    def close(self) -> None:
        """Leaves the group."""
        dist.destroy_process_group()

    def _broadcast(self, numbers: Sequence[int] | None) -> list[int]:
        first = torch.zeros(_FIRST_NUMBERS + 1, dtype=torch.int64)
        if numbers is not None:
            head = numbers[:_FIRST_NUMBERS]
            first[: len(head) + 1] = torch.tensor([len(numbers), *head])
        dist.broadcast(first, 0, group=self.plans)
        count = int(first[0])
        known: list[int] = first[1 : min(count, _FIRST_NUMBERS) + 1].tolist()
        if count <= _FIRST_NUMBERS:
            return known
        rest = torch.zeros(count - _FIRST_NUMBERS, dtype=torch.int64)
        if numbers is not None:
            rest[:] = torch.tensor(numbers[_FIRST_NUMBERS:])
        dist.broadcast(rest, 0, group=self.plans)
        return known + rest.tolist()


def summed(tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, in place."""
    dist.all_reduce(tensor)
    return tensor


def gathered(
    tensor: Tensor,  # [..., n], of one shape on all ranks
    size: int,
) -> Tensor:
    """All ranks' last dimensions, one after another: [..., size * n]."""
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim=-1)
