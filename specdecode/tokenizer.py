"""A model's tokenizer, and the digest by which router, target and draft know that they mean the same ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdecode.errors import FailedPreconditionError

__all__ = ["PreTrainedTokenizerBase", "eos_token_ids", "fingerprint", "load_tokenizer", "vocab_size"]


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; no code from the directory is run.

    Raises:
        FailedPreconditionError: the directory has no tokenizer, or one without a `tokenizers` backend.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise FailedPreconditionError(f"{path} has no tokenizer that can be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise FailedPreconditionError(f"{path}: its tokenizer has no tokenizer.json, which is needed")
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 hex digest over the vocabulary, sorted by id, and the ids of special tokens.

    Equal digests mean that every id stands for the same token. Which of the special ids ends a text is left
    out on purpose: a base model may draft for the instruct model made from it.
    """
    vocabulary = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    special = sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    payload = json.dumps([vocabulary, special], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(payload.encode("ascii")).hexdigest()


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id; ids of a model's logits from here on are padding and never have mass."""
    return 1 + max(int(token_id) for token_id in tokenizer.get_vocab().values())


def eos_token_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a text, ascending: generation_config.json's, else config.json's, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        ids = _eos_of(path / name)
        if ids:
            return ids
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def _eos_of(file: Path) -> tuple[int, ...]:
    if not file.is_file():
        return ()
    config: dict[str, Any] = json.loads(file.read_text())
    ids = config.get("eos_token_id")
    if ids is None:
        ids = config.get("text_config", {}).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(sorted({int(i) for i in listed}))
