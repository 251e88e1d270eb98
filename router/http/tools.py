"""Calls of tools in what a model says: found as the text comes, in the notations that templates ask for."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from enum import Enum
from typing import Any

from specdecode.requests import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Notation(Enum):
    """How a model writes calls."""

    TAGS = "tags"
    """JSON objects between <tool_call> and </tool_call> (Hermes, Qwen, SmolLM3)."""
    OBJECT = "object"
    """The whole text is one JSON object with name and parameters (Llama 3)."""

    @classmethod
    def of(cls, chat_template: str) -> Notation:
        """What a template asks its model for."""
        return cls.TAGS if _OPEN in chat_template else cls.OBJECT


class CallFinder:
    """Text of one choice in pieces, text and calls out; what may be the beginning of a call is held.

    Args:
        most: calls that are looked for; the text after them is dropped with further calls. None: any number.
    """

    def __init__(self, notation: Notation, most: int | None) -> None:
        self._notation = notation
        self._most = most
        self._held = ""
        self._began = False
        self.num_calls = 0

    def push(self, text: str) -> Iterator[str | ToolCall]:
        """What is known now."""
        self._held += text
        yield from self._from_tags() if self._notation is Notation.TAGS else self._from_start()

    def finish(self) -> Iterator[str | ToolCall]:
        """What was held, at the end."""
        rest, self._held = self._held, ""
        call = _call_in(rest.removeprefix(_OPEN)) if self._notation is Notation.TAGS else _call_in(rest)
        if call is not None:
            yield from self._counted(call)
        elif rest and not (self.num_calls and rest.isspace()):
            yield rest

    def _from_tags(self) -> Iterator[str | ToolCall]:
        while True:
            before, opening, after = self._held.partition(_OPEN)
            if not opening:
                safe = len(before) - _overlap(before, _OPEN)
                self._held = before[safe:]
                yield from self._said(before[:safe])
                return
            yield from self._said(before)
            inside, closing, rest = after.partition(_CLOSE)
            if not closing:
                self._held = opening + after
                return
            self._held = rest
            call = _call_in(inside)
            yield from [opening + inside + closing] if call is None else self._counted(call)

    def _from_start(self) -> Iterator[str | ToolCall]:
        """Held to the end if it begins like an object, else text."""
        begun = self._held.lstrip()
        if self._began or (begun and not begun.startswith("{")):
            self._began = True
            text, self._held = self._held, ""
            yield from self._said(text)

    def _said(self, text: str) -> Iterator[str]:
        """Blanks beside calls are the notation's."""
        if text and not (self.num_calls and text.isspace()):
            yield text

    def _counted(self, call: ToolCall) -> Iterator[ToolCall]:
        if self._most is None or self.num_calls < self._most:
            self.num_calls += 1
            yield call


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


def _call_in(text: str) -> ToolCall | None:
    """The call that a JSON object describes; None if it is none."""
    try:
        said: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get("arguments", said.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", said["name"], json.dumps(arguments, ensure_ascii=False))
