"""Logprobs in the shapes of both APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from router.text import Tokenizer
from specdecode.requests import EmittedToken
from specdecode.types import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""What OpenAI says of a token without any probability: JSON has no infinity."""


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text by itself; U+FFFD for bytes that are no whole character."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[EmittedToken]) -> dict[str, Any]:
    """One entry a token, with its alternatives."""
    entries = []
    for told in filter(None, (token.logprobs for token in tokens)):
        entry = _entry(tokenizer, told.token_id, told.logprob)
        entry["top_logprobs"] = [_entry(tokenizer, token_id, logprob) for token_id, logprob in told.top]
        entries.append(entry)
    return {"content": entries, "refusal": None}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode(errors="replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(data),
    }


class CompletionLogprobs:
    """Of one choice, token by token: `text_offset` goes on from piece to piece.

    Args:
        offset: characters before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, tokens: Sequence[EmittedToken]) -> dict[str, Any]:
        """Parallel lists of the next tokens."""
        told = [token.logprobs for token in tokens if token.logprobs is not None]
        offsets = [self._next_offset(entry.token_id) for entry in told]
        return {
            "tokens": [token_text(self._tokenizer, entry.token_id) for entry in told],
            "token_logprobs": [max(entry.logprob, LEAST_LOGPROB) for entry in told],
            "top_logprobs": [self._top(entry) for entry in told],
            "text_offset": offsets,
        }

    def _next_offset(self, token_id: int) -> int:
        """Where the token's text begins; of part of a character, where that does."""
        before = self._offset
        if token_id in self._tokenizer.special_token_ids:
            return before
        data = self._tokenizer.token_bytes(token_id)
        self._offset += len(self._decoder.decode(data))
        # Bytes before that never became a character come out with this token.
        return max(before, self._offset - len(data.decode(errors="replace")))

    def _top(self, told: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens and the one that was emitted, by their texts."""
        best = reversed(((told.token_id, told.logprob), *told.top))
        return {
            token_text(self._tokenizer, token_id): max(logprob, LEAST_LOGPROB) for token_id, logprob in best
        }
