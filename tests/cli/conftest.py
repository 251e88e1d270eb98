from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.text import Tokenizer
from tests.cli.running import address_of, program, up_arguments
from tests.router import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, with room for a reply that takes a while."""
    path = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("model"))
    return tiny.save_llama(path, Tokenizer(path).vocab_size, max_length=4096)


@pytest.fixture(scope="session")
def router(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a router that `specdecode up` started, with both drafters, and matches of one token."""
    config = tmp_path_factory.mktemp("config") / "specdecode.toml"
    config.write_text("[draft]\nngram_min = 1\n[router]\ndraft_deadline_seconds = 30\n")
    with program(*up_arguments(model, f"--draft-model={model}", f"--config={config}")) as up:
        yield address_of(up)
