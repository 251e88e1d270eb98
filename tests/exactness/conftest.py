"""What every test of exactness shares."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_fails_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The engine runs each sequence by itself where a step of all fails: right texts would hide the fault."""
    yield
    errors = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert not errors
