"""Chats in the shape that chat templates read."""

from __future__ import annotations

import json
from typing import Any

from specdecode.errors import InvalidArgumentError
from specdecode.requests import ChatMessage, ChatPrompt, Tool, ToolCall


def conversation_of(prompt: ChatPrompt) -> list[dict[str, Any]]:
    """The messages as templates take them: arguments of calls as objects, what is not given left out.

    Raises:
        InvalidArgumentError: arguments of a call are no JSON object.
    """
    return [_message(f"chat.messages[{index}]", message) for index, message in enumerate(prompt.messages)]


def tools_of(prompt: ChatPrompt) -> list[dict[str, Any]] | None:
    """The tools as templates take them; None without any, which templates tell from an empty list.

    Raises:
        InvalidArgumentError: parameters of a tool are no JSON object.
    """
    return [_tool(f"chat.tools[{index}]", tool) for index, tool in enumerate(prompt.tools)] or None


def text_size(prompt: ChatPrompt) -> int:
    """Characters of everything that a template may write."""
    return sum(map(len, texts_of(prompt)))


def texts_of(prompt: ChatPrompt) -> list[str]:
    """Everything that a template may write."""
    texts = [text for tool in prompt.tools for text in (tool.name, tool.description, tool.parameters)]
    for message in prompt.messages:
        texts += (message.role, message.content, message.tool_call_id, message.name)
        texts += [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
    return texts


def _message(field: str, message: ChatMessage) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        said["tool_calls"] = [_call(f"{field}.tool_calls[{index}]", call) for index, call in calls]
    if message.tool_call_id:
        said["tool_call_id"] = message.tool_call_id
    if message.name:
        said["name"] = message.name
    return said


def _call(field: str, call: ToolCall) -> dict[str, Any]:
    arguments = _object(f"{field}.arguments", call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _tool(field: str, tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters:
        function["parameters"] = _object(f"{field}.parameters", tool.parameters)
    return {"type": "function", "function": function}


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidArgumentError.of(field, "is no JSON object")
    return value
