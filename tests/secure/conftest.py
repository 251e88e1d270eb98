from __future__ import annotations

from pathlib import Path

import pytest

from router.text import Tokenizer
from tests.router import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of context 256 and its byte-level tokenizer."""
    path = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("model"))
    return tiny.save_llama(path, Tokenizer(path).vocab_size)
