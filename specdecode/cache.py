"""Where the package keeps what is expensive to make: converted models, compiled kernels, measurements."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "SPECDECODE_CACHE"


def cache_root() -> Path:
    """`$SPECDECODE_CACHE`, by default `~/.cache/specdecode`; it may not exist yet."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/specdecode").expanduser()
