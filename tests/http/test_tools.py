"""Calls of tools: found in text however it is cut, and through all services from a model that makes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from router.http.tools import CallFinder, Notation
from router.text import Tokenizer
from specdecode.errors import InvalidArgumentError
from specdecode.requests import ChatMessage, ChatPrompt, Tool, ToolCall
from tests.http.conftest import openai_client
from tests.router import tiny
from tests.services import Services

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOK = '{"name": "look", "arguments": {"at": "sky"}}'
SAID = f"Let me see.\n<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>{LOOK}</tool_call>"


def found_in(notation: Notation, pieces: Sequence[str], most: int | None = None) -> tuple[str, list[Any]]:
    """Text and calls."""
    finder = CallFinder(notation, most)
    parts = [part for piece in pieces for part in finder.push(piece)] + list(finder.finish())
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
    return "".join(part for part in parts if isinstance(part, str)), calls


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


CASES: list[tuple[Notation, str, str, int]] = [
    (Notation.TAGS, SAID, "Let me see.\n", 2),
    (Notation.TAGS, f"<tool_call>{LOOK}", "", 1),
    (Notation.TAGS, "no call < tool_call>, <tool_cal", "no call < tool_call>, <tool_cal", 0),
    (Notation.TAGS, "<tool_call>nonsense</tool_call>.", "<tool_call>nonsense</tool_call>.", 0),
    (Notation.TAGS, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", 0),
    (Notation.OBJECT, '{"name": "look", "parameters": {"at": "sky"}}', "", 1),
    (Notation.OBJECT, f"\n {LOOK}", "", 1),
    (Notation.OBJECT, '{"name": "look"', '{"name": "look"', 0),
    (Notation.OBJECT, f"The call is {LOOK}", f"The call is {LOOK}", 0),
]


@pytest.mark.parametrize(("notation", "text", "said", "num_calls"), CASES, ids=lambda value: str(value)[:40])
@given(places=st.lists(st.integers(0, 300), max_size=8))
async def test_calls_are_found_however_the_text_is_cut(
    notation: Notation, text: str, said: str, num_calls: int, places: list[int]
) -> None:
    expected = [("look", {"at": "sky"})] * num_calls
    assert found_in(notation, cut(text, places)) == (said, expected)
    assert found_in(notation, text) == (said, expected)


async def test_no_more_calls_than_asked_for() -> None:
    assert found_in(Notation.TAGS, [SAID], most=1) == ("Let me see.\n", [("look", {"at": "sky"})])


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (
            ChatPrompt((ChatMessage("assistant", "", (ToolCall("1", "look", "[]"),)),)),
            "chat.messages[0].tool_calls[0].arguments",
        ),
        (ChatPrompt((ChatMessage("user", "hi"),), (Tool("look", "", "{"),)), "chat.tools[0].parameters"),
    ],
)
async def test_what_is_no_object_is_refused_by_name(talker: Path, prompt: ChatPrompt, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Tokenizer(talker).encode_chat(prompt)
    assert caught.value.violations[0].field == field


TEMPLATE = (
    "{% if tools %}<s>tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "call by <tool_call></tool_call></s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}</s>\n{% endfor %}<s>assistant\n"
)
ASK: list[Any] = [{"role": "user", "content": "the sky?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks somewhere.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learnt one answer by heart: it calls a tool twice when it is offered one."""
    path = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("talker"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer(path)
    tiny.save_llama(path, tokenizer.vocab_size, max_length=1024)
    prompt = tokenizer.encode_chat(ChatPrompt((ChatMessage("user", "the sky?"),), (Tool("look"),)))
    _learn(path, [*prompt, *tokenizer.encode_text(SAID), tiny.EOS], len(prompt))
    return path


def _learn(path: Path, ids: Sequence[int], num_prompt: int) -> None:
    """Trains until greedy decoding of the prompt says the rest."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.tensor([list(ids)])
    for _ in range(400):
        logits = model(batch).logits[0, num_prompt - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, batch[0, num_prompt:])
        if loss < 0.02:
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert bool((logits.argmax(-1) == batch[0, num_prompt:]).all())
    model.save_pretrained(path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def talking(talker: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        Services.started(talker, http_port=0) as services,
        openai_client(services.router.url) as client,
    ):
        yield client


async def test_a_model_that_calls_tools_is_answered_for_with_calls(talking: openai.AsyncOpenAI) -> None:
    answer = await talking.chat.completions.create(
        model="", messages=ASK, tools=TOOLS, tool_choice="auto", temperature=0
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see.\n"
    assert choice.message.tool_calls is not None
    first, second = (call for call in choice.message.tool_calls if call.type == "function")
    for call in (first, second):
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "sky"})
    assert first.id != second.id


async def test_streamed_calls_are_the_same(talking: openai.AsyncOpenAI) -> None:
    async with talking.chat.completions.stream(
        model="", messages=ASK, tools=TOOLS, temperature=0, logprobs=True
    ) as stream:
        told = 0
        async for event in stream:
            if event.type == "chunk":
                logprobs = event.chunk.choices[0].logprobs
                told += len(logprobs.content or ()) if logprobs else 0
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.\n")
    assert choice.message.tool_calls is not None
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("look", {"at": "sky"})] * 2
    assert told > 0


async def test_one_call_alone_where_parallel_ones_are_not_wanted(talking: openai.AsyncOpenAI) -> None:
    answer = await talking.chat.completions.create(
        model="", messages=ASK, tools=TOOLS, temperature=0, parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls or ()) == 1


async def test_calls_and_what_came_of_them_go_through_the_template(talking: openai.AsyncOpenAI) -> None:
    first = await talking.chat.completions.create(model="", messages=ASK, tools=TOOLS, temperature=0)
    message = first.choices[0].message
    assert message.tool_calls is not None
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "blue"} for call in message.tool_calls
    ]
    answer = await talking.chat.completions.create(
        model="", messages=[*ASK, message.to_dict(), *results], tools=TOOLS, max_tokens=5
    )
    assert answer.choices[0].finish_reason in ("length", "stop")


async def test_a_tool_whose_arguments_are_to_be_forced_is_refused(talking: openai.AsyncOpenAI) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    with pytest.raises(openai.BadRequestError) as caught:
        await talking.chat.completions.create(model="", messages=ASK, tools=strict)  # type: ignore[arg-type]
    assert caught.value.param == "tools[0].function.strict"
