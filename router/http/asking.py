"""Bodies to requests: the same dataclasses that the gRPC front makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from router.http import unserved
from router.http.bodies import ChatBody, CompletionBody, Message, SpeculativeDecoding, ToolBody
from specdecode.errors import InvalidArgumentError
from specdecode.requests import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingOptions,
    SpeculationOptions,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
)

_COMPLETION_TOKENS = 16
"""What OpenAI's completions are cut at where nothing else is asked for."""


@dataclass(frozen=True)
class Asked:
    """What one body asks for.

    Attributes:
        requests: one a prompt; all have the same options.
        stream: whether the answer is sent as it comes.
        include_usage: whether a stream ends with token counts.
        extension: what is to be told of speculation; None: nothing.
        echo: whether the prompt is said before the completion.
        logprobs: whether logprobs are told.
        calls: most calls of tools that are looked for in the text; None: any number.
        names: what the body calls fields that `router.validation` calls otherwise.
        ignored: fields that nobody knows.
    """

    requests: tuple[GenerateRequest, ...]
    stream: bool
    include_usage: bool
    extension: SpeculativeDecoding | None
    echo: bool
    logprobs: bool
    calls: int | None
    names: Mapping[str, str]
    ignored: tuple[str, ...]


def asked_by_chat(body: ChatBody) -> Asked:
    """What a chat asks for.

    Raises:
        InvalidArgumentError: it asks for something that is not served.
    """
    ignored = unserved.check_extra(body.model_extra or {})
    unserved.check_response_format(body.response_format)
    unserved.check_tool_choice(body.tool_choice)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgumentError.of("top_logprobs", "needs logprobs: true")
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = body.tools if body.tools and body.tool_choice != "none" else ()
    return _asked(
        body,
        (chat_prompt(body.messages, tools),),
        max_tokens=longest,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        calls=0 if not tools else 1 if body.parallel_tool_calls is False else None,
        names={
            "logprobs": "top_logprobs",
            "max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        },
        ignored=ignored,
    )


def asked_by_completion(body: CompletionBody) -> Asked:
    """What a completion asks for.

    Raises:
        InvalidArgumentError: it asks for something that is not served.
    """
    ignored = unserved.check_extra(body.model_extra or {})
    if body.suffix:
        raise InvalidArgumentError.of("suffix", "text can't be inserted; the prompt is continued at its end")
    if body.echo and body.logprobs is not None:
        raise InvalidArgumentError.of("echo", "with logprobs: those of prompts are not computed")
    if (body.model_extra or {}).get("best_of") not in (None, 1, body.n):
        raise InvalidArgumentError.of("best_of", "texts are not ranked; ask for n")
    return _asked(
        body,
        tuple(TextPrompt(entry) if isinstance(entry, str) else TokenPrompt(entry) for entry in body.prompt),
        max_tokens=_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        calls=0,
        names={},
        ignored=ignored,
        echo=bool(body.echo),
    )


def _asked(
    body: ChatBody | CompletionBody,
    prompts: tuple[Prompt, ...],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    calls: int | None,
    names: Mapping[str, str],
    ignored: tuple[str, ...],
    echo: bool = False,
) -> Asked:
    if body.stream_options is not None and not body.stream:
        raise InvalidArgumentError.of("stream_options", "needs stream: true")
    extension = body.speculative_decoding
    requests = tuple(
        GenerateRequest(
            prompt=prompt,
            sampling=_sampling(body, max_tokens, logprobs),
            speculation=SpeculationOptions() if extension is None else _speculation(extension),
            n=body.n,
            model=body.model,
            include_rounds=extension is not None and extension.include_rounds,
            cache_salt=(body.cache_salt or "").encode(),
            include_report=extension is not None,
        )
        for prompt in prompts
    )
    return Asked(
        requests=requests,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        extension=extension,
        echo=echo,
        logprobs=logprobs is not None,
        calls=calls,
        names=names,
        ignored=ignored,
    )


def _sampling(
    body: ChatBody | CompletionBody, max_tokens: int | None, logprobs: int | None
) -> SamplingOptions:
    return SamplingOptions(
        temperature=body.temperature,
        top_k=0 if body.top_k == -1 else body.top_k,  # how vLLM says that it is off
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_biases(body.logit_bias or {}),
        allowed_token_ids=body.allowed_token_ids,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        seed=body.seed,
    )


def _biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token_id), bias) for token_id, bias in biases.items())
    except ValueError:
        raise InvalidArgumentError.of("logit_bias", "has a key that is no token id") from None


def _speculation(extension: SpeculativeDecoding) -> SpeculationOptions:
    return SpeculationOptions(
        mode=extension.mode,
        num_draft_tokens=extension.num_draft_tokens,
        drafter=extension.drafter,
        method=extension.method,
        min_acceptance=extension.min_acceptance,
        tier=extension.tier,
        traffic_class=extension.traffic_class,
        remember_output=extension.remember_output,
    )


def chat_prompt(messages: tuple[Message, ...], tools: tuple[ToolBody, ...]) -> ChatPrompt:
    """The chat as the core takes it.

    Raises:
        InvalidArgumentError: a tool asks for a grammar.
    """
    for index, tool in enumerate(tools):
        unserved.check_tool_strict(index, tool.function.model_extra or {})
    return ChatPrompt(tuple(map(_message, messages)), tuple(map(_tool, tools)))


def _message(message: Message) -> ChatMessage:
    calls = message.tool_calls or ()
    return ChatMessage(
        # What OpenAI calls it since its reasoning models; templates know the old name.
        role="system" if message.role == "developer" else message.role,
        content=message.content,
        tool_calls=tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in calls),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _tool(tool: ToolBody) -> Tool:
    function = tool.function
    parameters = "" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
    return Tool(function.name, function.description or "", parameters)
