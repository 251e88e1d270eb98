"""What is answered, in the shape of each API: as a whole, or a chunk for each piece."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from router.http.asking import Asked
from router.http.logprobs import CompletionLogprobs, chat_logprobs
from router.http.speculation import details_of, metrics_of
from router.http.tools import CallFinder, Notation
from router.text import Tokenizer
from specdecode.client import Completion, total_usage
from specdecode.requests import EmittedToken, Piece, TextPrompt, TokenPrompt, ToolCall
from specdecode.types import FinishReason, Usage


class Shape(ABC):
    """Of the answer to one body.

    Args:
        asked: what the body asks for.
        model: name of the model that answers.
        fingerprint: equal for answers of the same model and version.
    """

    prefix: str
    whole: str
    chunk: str

    def __init__(self, asked: Asked, tokenizer: Tokenizer, model: str, fingerprint: str) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._model = model
        self._fingerprint = fingerprint
        self._created = int(time.time())

    def chunks(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """What a stream says of a piece."""
        for entry in self._deltas(choice, piece):
            told = self._envelope(piece.request_id, self.chunk) | {"choices": [entry]}
            if self._asked.include_usage:
                told["usage"] = None
            yield told

    def last_chunks(self, request_id: str, ended: Sequence[Completion]) -> Iterator[dict[str, Any]]:
        """What a stream says of all choices when they have ended."""
        told = self._sums(ended)
        if not self._asked.include_usage:
            del told["usage"]
        if told:
            yield self._envelope(request_id, self.chunk) | {"choices": []} | told

    def answer(self, request_id: str, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return self._envelope(request_id, self.whole) | {"choices": choices} | self._sums(completions)

    def _envelope(self, request_id: str, kind: str) -> dict[str, Any]:
        return {
            "id": self.prefix + request_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _sums(self, ended: Sequence[Completion]) -> dict[str, Any]:
        usage = total_usage(ended)
        told: dict[str, Any] = {"usage": _usage(usage)}
        if self._asked.extension is not None:
            figures = (entry for completion in ended for entry in completion.report)
            told["metrics"] = {"speculative_decoding": metrics_of(usage, figures)}
        return told

    def _entry(
        self, index: int, logprobs: object, finish_reason: str | None, stop: str | None, **said: Any
    ) -> dict[str, Any]:
        entry = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        return entry | {"stop_reason": stop} if finish_reason is not None else entry

    def _details(self, said: Piece | Completion) -> dict[str, Any]:
        extension = self._asked.extension
        if extension is None:
            return {}
        told = details_of(extension, self._tokenizer, said.tokens, said.rounds)
        return {"speculative_decoding": told} if told else {}

    @abstractmethod
    def _deltas(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that a piece becomes."""

    @abstractmethod
    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice of the whole answer."""


class ChatShape(Shape):
    """`chat.completion`."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: Asked, tokenizer: Tokenizer, model: str, fingerprint: str) -> None:
        super().__init__(asked, tokenizer, model, fingerprint)
        self._finders: dict[int, CallFinder | None] = {}

    def _deltas(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        if choice not in self._finders:
            self._finders[choice] = self._finder()
            yield self._entry(choice, None, None, None, delta={"role": "assistant", "content": ""})
        finder = self._finders[choice]
        found = self._found(finder, piece.text, piece.usage is not None)
        logprobs = self._logprobs(piece.tokens)
        details = self._details(piece)
        for part in found:
            delta = _call_delta(finder, part) if isinstance(part, ToolCall) else {"content": part}
            yield self._entry(choice, logprobs, None, None, delta=delta, **details)
            logprobs, details = None, {}
        if logprobs is not None or details:
            yield self._entry(choice, logprobs, None, None, delta={}, **details)
        if piece.finish_reason is not None:
            reason = self._finish_reason(piece.finish_reason, finder)
            yield self._entry(choice, None, reason, piece.stop, delta={})

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        finder = self._finder()
        found = list(self._found(finder, completion.text, last=True))
        calls = [part for part in found if isinstance(part, ToolCall)]
        text = "".join(part for part in found if isinstance(part, str))
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": list(map(_call, calls))}
        return self._entry(
            index,
            self._logprobs(completion.tokens),
            self._finish_reason(completion.finish_reason, finder),
            completion.stop,
            message=message,
            **self._details(completion),
        )

    def _finder(self) -> CallFinder | None:
        if self._asked.calls == 0:
            return None
        return CallFinder(Notation.of(self._tokenizer.chat_template), self._asked.calls)

    def _found(self, finder: CallFinder | None, text: str, last: bool) -> Iterable[str | ToolCall]:
        if finder is None:
            return (text,) if text else ()
        return [*finder.push(text), *(finder.finish() if last else ())]

    def _logprobs(self, tokens: Sequence[EmittedToken]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, tokens) if self._asked.logprobs and tokens else None

    def _finish_reason(self, reason: FinishReason | None, finder: CallFinder | None) -> str | None:
        if reason is FinishReason.STOP and finder is not None and finder.num_calls:
            return "tool_calls"
        return None if reason is None else reason.value


class CompletionShape(Shape):
    """`text_completion`."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, asked: Asked, tokenizer: Tokenizer, model: str, fingerprint: str) -> None:
        super().__init__(asked, tokenizer, model, fingerprint)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    def _deltas(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        before = "" if choice in self._begun else self._echoed(choice)
        self._begun.add(choice)
        yield self._said(choice, before, piece)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return self._said(index, self._echoed(index), completion)

    def _said(self, choice: int, before: str, said: Piece | Completion) -> dict[str, Any]:
        logprobs = None
        if self._asked.logprobs:
            told = self._logprobs.setdefault(choice, CompletionLogprobs(self._tokenizer))
            logprobs = told.take(said.tokens)
        reason = None if said.finish_reason is None else said.finish_reason.value
        text = before + said.text
        return self._entry(choice, logprobs, reason, said.stop, text=text, **self._details(said))

    def _echoed(self, choice: int) -> str:
        """The prompt's text, where it is asked for."""
        if not self._asked.echo:
            return ""
        requests = self._asked.requests
        match requests[choice // (requests[0].n or 1)].prompt:
            case TextPrompt(text):
                return text
            case TokenPrompt(token_ids):
                return self._tokenizer.decode(token_ids)
            case _:
                return ""


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_emitted,
        "total_tokens": usage.num_prompt_tokens + usage.num_emitted,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(finder: CallFinder | None, call: ToolCall) -> dict[str, Any]:
    index = 0 if finder is None else finder.num_calls - 1
    return {"tool_calls": [{"index": index, **_call(call)}]}
