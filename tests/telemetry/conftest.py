from __future__ import annotations

from tests.router.conftest import byte_level, model, other_model

__all__ = ["byte_level", "model", "other_model"]
