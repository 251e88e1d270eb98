"""Prompts of the user's own: one JSON object a line, as files of prompts and logs of requests have them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdecode.distill.prompts import HELD_OUT_SHARE, Prompt, PromptKind
from specdecode.errors import InvalidArgumentError

_DEFAULT_TEMPERATURES = (0.0, 0.7, 1.0)


def read_prompts(path: Path, option: str) -> list[Prompt]:
    """The prompts of a file, each with one JSON object a line: `messages` (role and content, as in OpenAI's
    API) or `prompt`, and optionally `temperature`; whatever else a line says, an answer for example, is not
    looked at. Without a temperature they take turns at 0, 0.7 and 1.

    Raises:
        InvalidArgumentError: the file can't be read, or no line of it holds a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError.of(option, f"{path} can't be read: {error}") from error
    prompts = _some_held_out(list(_prompts(lines)))
    if not prompts:
        raise InvalidArgumentError.of(
            option,
            f'{path}: none of its {len(lines)} lines is a JSON object with "messages" or "prompt"',
        )
    return prompts


def _prompts(lines: Sequence[str]) -> Iterator[Prompt]:
    for number, line in enumerate(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            prompt = _prompt(found, _DEFAULT_TEMPERATURES[number % len(_DEFAULT_TEMPERATURES)])
            if prompt is not None:
                yield prompt


def _prompt(found: Mapping[str, Any], temperature: float) -> Prompt | None:
    given = found.get("temperature")
    if isinstance(given, int | float) and 0 <= given <= 2:
        temperature = float(given)
    messages, text = _messages(found.get("messages")), found.get("prompt")
    if messages:
        return Prompt(PromptKind.LOGGED, temperature, held_out=False, messages=messages)
    if isinstance(text, str) and text.strip():
        return Prompt(PromptKind.LOGGED, temperature, held_out=False, text=text)
    return None


def _some_held_out(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, one in `HELD_OUT_SHARE` different ones held out; equal ones stay together."""
    keys = [repr((prompt.messages, prompt.text)) for prompt in prompts]
    ranked = sorted(set(keys), key=lambda key: (zlib.crc32(key.encode()), key))
    chosen = set(ranked[: -(-len(ranked) // HELD_OUT_SHARE)])
    return [replace(prompt, held_out=key in chosen) for prompt, key in zip(prompts, keys, strict=True)]


def _messages(found: Any) -> tuple[tuple[str, str], ...]:
    """(role, content) of each message up to the last of a user; empty where they are not of that form."""
    if not isinstance(found, list):
        return ()
    pairs: list[tuple[str, str]] = []
    for message in found:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (0, 0)
        if not (isinstance(role, str) and isinstance(content, str)):
            return ()
        pairs.append((role, content))
    while pairs and pairs[-1][0] != "user":
        pairs.pop()
    return tuple(pairs)
