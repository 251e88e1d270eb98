from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of context 256 and its byte-level tokenizer."""
    return _model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary, and of half the context."""
    return _model(tmp_path_factory.mktemp("other_model"), max_length=128, seed=1, layers=1)


@pytest.fixture(scope="session")
def foreign_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another vocabulary."""
    return _model(tmp_path_factory.mktemp("foreign_model"), num_merges=20)


def _model(path: Path, num_merges: int = 150, **config: Any) -> Path:
    tiny.save_byte_level_tokenizer(path, num_merges)
    return tiny.save_llama(path, Tokenizer(path).vocab_size, **config)
