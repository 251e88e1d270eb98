"""Text to ids and back: prompts in, pieces of text out.

What a choice says arrives as ids, a few at a time, and leaves as text that is never taken back: a character
is held until all its bytes are there, and what could be the beginning of a stop string until it is known not
to be.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from jinja2 import TemplateError

from router.chat import conversation_of, tools_of
from specdecode.errors import InvalidArgumentError
from specdecode.requests import ChatPrompt
from specdecode.tokenizer import (
    PreTrainedTokenizerBase,
    eos_token_ids,
    fingerprint,
    load_tokenizer,
    vocab_size,
)

_REPLACEMENT = "\ufffd"

_TOOLS = re.compile(r"\btools\b")

# How vocabularies with byte fallback write a byte, and the blank before a word.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_MARK = "\u2581"

# From this many characters on by `encode_batch`, which lets other threads run; `encode` does not.
_LONG_TEXT = 4096


class Tokenizer:
    """A model's tokenizer and chat template.

    Attributes:
        fingerprint: see `specdecode.tokenizer.fingerprint`.
        vocab_size: one more than the largest id.
        eos_token_ids: ids that end a text.
        max_token_bytes: bytes of the longest token; n bytes of text are at least n / max_token_bytes ids.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(path)
        self._backend = self._tokenizer.backend_tokenizer
        self.fingerprint = fingerprint(self._tokenizer)
        self.vocab_size = vocab_size(self._tokenizer)
        self.eos_token_ids = eos_token_ids(path, self._tokenizer)
        self.max_token_bytes = max(len(token.encode()) for token in self._tokenizer.get_vocab())

    def encode_text(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text as is, with the special tokens that the tokenizer itself adds."""
        return self._encode(text, add_special_tokens)

    def encode_chat(self, prompt: ChatPrompt) -> tuple[int, ...]:
        """Ids of a chat, rendered by the chat template, ready for the assistant's answer.

        Raises:
            InvalidArgumentError: the model has no template, or the template refuses the messages or has no
                place for tools.
        """
        if not self._tokenizer.chat_template:
            raise InvalidArgumentError.of("chat", "the model has no chat template; send text or token ids")
        if prompt.tools and _TOOLS.search(self.chat_template) is None:
            raise InvalidArgumentError.of("chat.tools", "the model's chat template has no place for tools")
        conversation, tools = conversation_of(prompt), tools_of(prompt)
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError) as error:
            raise InvalidArgumentError.of("chat", f"refused by the model's template: {error}") from error
        return self._encode(text, add_special_tokens=False)

    @cached_property
    def chat_template(self) -> str:
        """The template that chats with tools are rendered by; "" without one."""
        if not self._tokenizer.chat_template:
            return ""
        return str(self._tokenizer.get_chat_template(tools=[{}]))

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) < _LONG_TEXT:
            return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return tuple(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, special tokens left out unless they are asked for."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for, special tokens by their names: maybe part of a character only."""
        token = self._backend.id_to_token(token_id) or ""
        if token_id in self.special_token_ids:
            return token.encode()
        if self._is_byte_level:
            return self._token_bytes[token_id]
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(byte[1], 16)])
        return token.replace(_WORD_MARK, " ").encode()

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        if self._is_byte_level:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self)

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that have no text."""
        added = self._tokenizer.added_tokens_decoder
        return frozenset(int(token_id) for token_id, token in added.items() if token.special)

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        """Bytes of each id; empty for special tokens and for ids that stand for nothing."""
        byte_of = {char: byte for byte, char in enumerate(_byte_level_alphabet())}
        table = [b""] * self.vocab_size
        for token, token_id in self._tokenizer.get_vocab().items():
            if token_id not in self.special_token_ids:
                known = all(char in byte_of for char in token)
                table[token_id] = bytes(byte_of[char] for char in token) if known else token.encode()
        return table


def _byte_level_alphabet() -> str:
    """The 256 characters that stand for bytes 0 to 255 in byte-level vocabularies (GPT-2's convention)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in shown else next(substitutes)) for byte in range(256))


class Detokenizer(Protocol):
    """Ids one by one to text that is never taken back."""

    def push(self, token_id: int) -> str:
        """The text that this id completes, maybe none."""

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as U+FFFD."""

    @property
    def incomplete(self) -> bool:
        """Whether the last ids end within a character."""


class ByteDetokenizer:
    """For byte-level vocabularies: exact, and a character is out with its last byte."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    @property
    def incomplete(self) -> bool:
        return bool(self._decoder.getstate()[0])


class WindowDetokenizer:
    """For any other vocabulary: decodes the last ids twice and takes the difference.

    The window starts with the ids that were shown last, because decoders treat the first id specially.
    """

    # A character has at most 4 bytes, so whoever has not completed one after so many ids never will.
    _MAX_HELD = 16

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._special = tokenizer.special_token_ids
        self._shown: list[int] = []
        self._shown_text = ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        self._held.append(token_id)
        text = self._decode(self._shown + self._held)
        if text.endswith(_REPLACEMENT) and len(self._held) < self._MAX_HELD:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._shown + self._held)) if self._held else ""

    def _show(self, text: str) -> str:
        piece = text[len(self._shown_text) :]
        if piece:
            self._shown, self._held = self._held, []
            self._shown_text = self._decode(self._shown)
        return piece

    @property
    def incomplete(self) -> bool:
        return bool(self._held)


class TextStream:
    """What of one choice may be said: ids with their text, up to the first stop string.

    An id is released when all its text is; text and ids of one `take` belong together. The stop string that
    ends first wins (the longest of several that end there); the id that completes it is the last one, and the
    text ends before it. Stop strings that `min_tokens` does not allow yet are passed over.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._prefixes = {stop[:end] for stop in stops for end in range(1, len(stop))}
        self._longest_prefix = max(map(len, self._prefixes), default=0)
        self._min_tokens = min_tokens
        self._num_pushed = 0
        self._held = ""
        self._held_ends: deque[int] = deque()
        self._num_open = 0
        self._text: list[str] = []
        self._num_released = 0
        self.stop: str | None = None

    def push(self, token_id: int) -> bool:
        """Takes the next id; whether it completed a stop string (then nothing may follow)."""
        self._num_pushed += 1
        old_length = len(self._held)
        self._held += self._detokenizer.push(token_id)
        self._num_open += 1
        if not self._detokenizer.incomplete:
            self._close_open()
        if self._stops and self._num_pushed >= self._min_tokens and self._find_stop(old_length):
            return True
        self._release(len(self._held) - self._possible_stop_length())
        return False

    def finish(self) -> None:
        """Nothing follows: releases everything that was held."""
        self._held += self._detokenizer.flush()
        self._close_open()
        self._release(len(self._held))

    def take(self) -> tuple[str, int]:
        """Text released since the last call, and the number of ids it belongs to."""
        text, count = "".join(self._text), self._num_released
        self._text.clear()
        self._num_released = 0
        return text, count

    def _close_open(self) -> None:
        """The ids that share the character that is now complete end with it."""
        self._held_ends.extend([len(self._held)] * self._num_open)
        self._num_open = 0

    def _find_stop(self, old_length: int) -> bool:
        found = []
        for stop in self._stops:
            start = self._held.find(stop, max(0, old_length - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return False
        _, start, self.stop = min(found)
        self._text.append(self._held[:start])
        self._num_released += len(self._held_ends) + self._num_open
        self._held, self._num_open = "", 0
        self._held_ends.clear()
        return True

    def _possible_stop_length(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        for length in range(min(self._longest_prefix, len(self._held)), 0, -1):
            if self._held[-length:] in self._prefixes:
                return length
        return 0

    def _release(self, safe_length: int) -> None:
        """Releases the ids whose text lies within the first `safe_length` held characters."""
        end = 0
        while self._held_ends and self._held_ends[0] <= safe_length:
            end = self._held_ends.popleft()
            self._num_released += 1
        if end:
            self._text.append(self._held[:end])
            self._held = self._held[end:]
            self._held_ends = deque(other - end for other in self._held_ends)
