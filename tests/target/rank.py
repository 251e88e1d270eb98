"""`python -m tests.target.rank ADDRESS BLOCKS PATH…`: rank 1 of 2, for one model after another."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from specdecode.lm.model import load_part
from specdecode.lm.ranks import Ranks
from specdecode.lm.runner import PagedLM


def main() -> None:
    address, num_blocks, *paths = sys.argv[1:]
    torch.set_num_threads(1)
    device = torch.device("cpu")
    ranks = Ranks.meet(1, 2, address, device)
    for path in paths:
        PagedLM(load_part(Path(path), "float32", device, ranks), int(num_blocks)).follow()
    ranks.close()


if __name__ == "__main__":
    main()
