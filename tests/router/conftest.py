from __future__ import annotations

import pytest

from router.text import Tokenizer
from specdecode.models import fetch
from tests.router import tiny


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny.save_byte_fallback_tokenizer(tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return Tokenizer(fetch("smollm2-135m-instruct"))
