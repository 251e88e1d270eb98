"""What is wrong is said before any work, in OpenAI's shape, with the field and the right status."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.http.conftest import openai_client
from tests.router.client import PROMPT
from tests.router.test_clients import Gate, is_plain
from tests.services import DEADLINE, Services, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "the fox"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": HELLO, **fields}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": PROMPT, **fields}


REFUSED: list[tuple[tuple[str, Any], str]] = [
    (completion(temperature=2.1), "temperature"),
    (completion(temperature="1"), "temperature"),
    (completion(top_p=0), "top_p"),
    (completion(top_k=-2), "top_k"),
    (completion(min_p=2), "min_p"),
    (completion(repetition_penalty=0), "repetition_penalty"),
    (completion(presence_penalty=3), "presence_penalty"),
    (completion(frequency_penalty=-3), "frequency_penalty"),
    (completion(logit_bias={"5": 101}), "logit_bias.5"),
    (completion(logit_bias={"x": 1}), "logit_bias"),
    (completion(logit_bias={"1000000": 1}), "logit_bias[0]"),
    (completion(logprobs=21), "logprobs"),
    (completion(max_tokens=0), "max_tokens"),
    (completion(max_tokens=10**12), "max_tokens"),
    (completion(min_tokens=9, max_tokens=8), "min_tokens"),
    (completion(n=17), "n"),
    (completion(seed=-1), "seed"),
    (completion(seed=2**64), "seed"),
    (completion(stop=[""]), "stop[0]"),
    (completion(stop=["x"] * 17), "stop"),
    (completion(stop=3), "stop"),
    (completion(stop_token_ids=[10**6]), "stop_token_ids[0]"),
    (completion(allowed_token_ids=[]), "allowed_token_ids"),
    (completion(prompt=""), "prompt"),
    (completion(prompt=[]), "prompt"),
    (completion(prompt=None), "prompt"),
    (completion(prompt={"a": 1}), "prompt"),
    (completion(prompt=[1, "a"]), "prompt"),
    (completion(prompt=[10**6]), "prompt[0]"),
    (completion(prompt=["a"] * 129), "prompt"),
    (completion(prompt="q" * 300), "prompt"),
    (completion(suffix="and then"), "suffix"),
    (completion(echo=True, logprobs=1), "echo"),
    (completion(best_of=3), "best_of"),
    (completion(stream_options={"include_usage": True}), "stream_options"),
    (completion(prompt_logprobs=1), "prompt_logprobs"),
    (completion(guided_json={}), "guided_json"),
    (completion(use_beam_search=True), "use_beam_search"),
    (completion(cache_salt="x" * 257), "cache_salt"),
    (completion(speculative_decoding={"num_draft_tokens": 33}), "speculative_decoding.num_draft_tokens"),
    (completion(speculative_decoding={"min_acceptance": 2}), "speculative_decoding.min_acceptance"),
    (completion(speculative_decoding={"method": "greedy"}), "speculative_decoding.method"),
    (completion(speculative_decoding={"mode": "often"}), "speculative_decoding.mode"),
    (completion(speculative_decoding={"drafts": 3}), "speculative_decoding.drafts"),
    (completion(speculative_decoding=True), "speculative_decoding"),
    (chat(messages=[]), "messages"),
    (chat(messages=[{"content": "x"}]), "messages[0].role"),
    (chat(messages=[{"role": "robot", "content": "x"}]), "messages"),
    (chat(messages=[{"role": "user", "content": [IMAGE]}]), "messages[0].content"),
    (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    (chat(max_completion_tokens=0, max_tokens=5), "max_completion_tokens"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format"),
    (chat(response_format={"type": "json_object"}), "response_format"),
    (chat(tools=[TOOL]), "tools"),
    (chat(tools=[TOOL], tool_choice="required"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look"}}), "tool_choice"),
    (chat(tools=[{"type": "retrieval"}]), "tools[0].type"),
    (chat(functions=[{"name": "look"}]), "functions"),
    (chat(modalities=["text", "audio"]), "modalities"),
    (chat(chat_template="{{ x }}"), "chat_template"),
    (chat(continue_final_message=True), "continue_final_message"),
    (("/tokenize", {}), "prompt"),
    (("/tokenize", {"messages": []}), "messages"),
    (("/detokenize", {"tokens": [1, -1]}), "tokens[1]"),
]


@pytest.mark.parametrize(("asked", "param"), REFUSED, ids=lambda value: str(value)[:70])
async def test_what_is_wrong_is_named_and_nothing_is_run(
    web: httpx2.AsyncClient, services: Services, asked: tuple[str, Any], param: str
) -> None:
    num_steps = services.target.num_steps
    path, body = asked
    answer = await web.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param)
    assert services.target.num_steps == num_steps


async def test_a_prompt_beyond_the_context_has_the_code_that_clients_look_for(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="", prompt=[20] * 256)
    assert caught.value.code == "context_length_exceeded"


async def test_a_stream_is_refused_as_a_whole_answer_is(web: httpx2.AsyncClient) -> None:
    answer = await web.post(COMPLETIONS, json={"prompt": PROMPT, "stream": True, "n": 17})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert answer.headers["content-type"] == "application/json"


HARMLESS: list[dict[str, Any]] = [
    {"suffix": "", "best_of": 1, "user": "u", "stop": None, "logit_bias": None, "seed": None, "n": None},
    {"use_beam_search": False, "skip_special_tokens": True, "prompt_logprobs": None, "bad_words": []},
    {"stream": None, "echo": None, "temperature": None, "top_p": None, "stream_options": None},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=str)
async def test_values_that_change_nothing_are_taken(web: httpx2.AsyncClient, fields: dict[str, Any]) -> None:
    answer = await web.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    assert "x-specdecode-ignored" not in answer.headers


async def test_tools_that_are_not_to_be_used_need_no_place_in_the_template(web: httpx2.AsyncClient) -> None:
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": "none", "max_tokens": 1}
    assert (await web.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("content", "content_type", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_argument"),
        (b"[]", "application/json", 400, "invalid_argument"),
        (b"", "application/json", 400, "invalid_argument"),
        (b'{"prompt": "\xff"}', "application/json", 400, "invalid_argument"),
        (b'{"prompt": ' + b"[" * 50_000, "application/json", 400, "invalid_argument"),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", 400, "invalid_argument"),
        (b"prompt=a", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b'{"prompt": "a"}', "text/plain", 415, "unsupported_media_type"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_is_no_body_is_refused(
    web: httpx2.AsyncClient, content: bytes, content_type: str, status: int, code: str
) -> None:
    answer = await web.post(COMPLETIONS, content=content, headers={"content-type": content_type})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/a/b", 404),
    ],
)
async def test_paths_that_are_not_served_say_so(
    web: httpx2.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await web.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4o") as caught:
        await client.completions.create(model="gpt-4o", prompt=PROMPT)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_above_the_limit_is_refused_while_it_comes(model: Path, announced: bool) -> None:
    async with (
        Services.started(model, http_port=0, max_message_bytes=64 * 1024) as services,
        httpx2.AsyncClient(base_url=services.router.url, timeout=DEADLINE) as web,
    ):
        content = json.dumps({"prompt": "x" * 100_000}).encode()

        async def pieces() -> Any:
            for start in range(0, len(content), 10_000):
                yield content[start : start + 10_000]

        answer = await web.post(
            COMPLETIONS,
            content=content if announced else pieces(),
            headers={"content-type": "application/json"},
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert (await web.post(COMPLETIONS, json={"prompt": PROMPT})).status_code == 200


async def test_one_request_too_many_is_told_when_to_come_back(model: Path) -> None:
    async with Services.started(model, http_port=0, max_requests=1) as services:
        async with openai_client(services.router.url) as client:
            first = await client.completions.create(
                model="", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(model="", prompt=PROMPT)
            assert caught.value.response.headers["retry-after"] == "1"
            assert caught.value.code == "queue_full"
            await first.close()

            async def is_answered() -> bool:
                try:
                    await client.completions.create(model="", prompt=PROMPT, max_tokens=1)
                except openai.RateLimitError:
                    return False
                return True

            await eventually(is_answered, "the place is free again")
        await services.all_is_free()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_replica_has_its_own_status_in_streams_too(model: Path, stream: bool) -> None:
    small = {"max_running": 1, "max_waiting": 1}
    async with Services.started(model, http_port=0, target=small) as services:
        gate = Gate(services.target, is_plain)
        waiting = services.target.replica.engine.scheduler.waiting
        async with openai_client(services.router.url) as client:
            options: Any = {"model": "", "prompt": PROMPT, "max_tokens": 20}
            first = asyncio.create_task(client.completions.create(**options))
            await gate.holds()
            second = asyncio.create_task(client.completions.create(**options))
            await eventually(lambda: services.target.has_orders, "the second has arrived")
            third = asyncio.create_task(client.completions.create(**options, stream=stream))
            async with asyncio.timeout(DEADLINE):
                await eventually(lambda: len(services.target.loop._inbox) >= 2, "the third, too")
                gate.open()
                with pytest.raises(openai.RateLimitError):
                    await third
                await asyncio.gather(first, second)
        assert not waiting
        await services.all_is_free()


async def test_without_a_target_it_is_unavailable_and_health_says_so(model: Path) -> None:
    async with Services.started(model, http_port=0, failover_seconds=0.1) as services:
        await services.target.stop()
        async with httpx2.AsyncClient(base_url=services.router.url, timeout=DEADLINE) as web:

            async def is_unwell() -> bool:
                return (await web.get("/health")).status_code == 503

            await eventually(is_unwell, "health tells of the lost target")
            answer = await web.post(COMPLETIONS, json={"prompt": PROMPT})
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "server_error"
            assert int(answer.headers["retry-after"]) >= 1


async def test_a_target_lost_in_a_stream_ends_it_with_an_error(model: Path) -> None:
    async with (
        Services.started(model, http_port=0, failover_seconds=0.1) as services,
        openai_client(services.router.url) as client,
    ):
        stream = await client.completions.create(
            model="", prompt=PROMPT, max_tokens=250, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = aiter(stream)
        await anext(chunks)
        with pytest.raises(openai.APIError, match="no target replica"):  # noqa: PT012
            await services.target.stop()
            async with asyncio.timeout(DEADLINE):
                async for _ in chunks:
                    pass
