from __future__ import annotations

from tests.router.conftest import byte_level, model

__all__ = ["byte_level", "model"]
