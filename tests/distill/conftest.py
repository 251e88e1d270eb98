from __future__ import annotations

from pathlib import Path

import pytest

from router.text import Tokenizer
from tests.router import tiny


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer of bytes and a chat template."""
    path = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("target"))
    return tiny.save_llama(path, Tokenizer(path).vocab_size, max_length=1024)
