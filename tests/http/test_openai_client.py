"""What OpenAI's own client gets, from all services over real sockets."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from router.text import Tokenizer
from specdecode.requests import ChatMessage, ChatPrompt
from specdecode.types import Origin
from specdecode.v1 import router_service_pb2 as pb
from tests.router.client import NGRAM, PROMPT, greedy, logprobs, request_for, speculating
from tests.services import Services

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[Any] = [{"role": "user", "content": "the fox"}]


def speculation(**options: Any) -> dict[str, Any]:
    """The extension object, as the client sends what it does not know."""
    return {"speculative_decoding": options}


async def test_a_completion_is_what_transformers_generates(
    client: openai.AsyncOpenAI, services: Services, model: Path, tokenizer: Tokenizer
) -> None:
    answer = await client.completions.create(model=model.name, prompt=PROMPT, max_tokens=40, temperature=0)
    ids = greedy(model, tokenizer.encode_text(PROMPT), 40)
    (choice,) = answer.choices
    assert choice.text == tokenizer.decode(ids)
    assert choice.finish_reason == ("length" if len(ids) == 40 else "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.prompt_tokens == len(tokenizer.encode_text(PROMPT))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(ids)
    assert (answer.object, answer.model) == ("text_completion", model.name)
    await services.all_is_free()


async def test_a_chat_is_rendered_by_the_template(
    client: openai.AsyncOpenAI, model: Path, tokenizer: Tokenizer
) -> None:
    answer = await client.chat.completions.create(
        model=model.name, messages=HELLO, max_completion_tokens=20, temperature=0
    )
    prompt = tokenizer.encode_chat(ChatPrompt((ChatMessage("user", "the fox"),)))
    message = answer.choices[0].message
    assert message.content == tokenizer.decode(greedy(model, prompt, 20))
    assert (message.role, message.tool_calls) == ("assistant", None)


async def test_content_in_parts_is_the_same_as_its_text(client: openai.AsyncOpenAI) -> None:
    async def said(content: Any) -> str | None:
        answer = await client.chat.completions.create(
            model="", messages=[{"role": "user", "content": content}], max_tokens=12, temperature=0
        )
        return answer.choices[0].message.content

    parts = [{"type": "text", "text": "the fox"}, {"type": "text", "text": "jumps"}]
    assert await said(parts) == await said("the fox\njumps")


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"logprobs": 2}, {"stop": ["e", "o"]}], ids=str)
async def test_a_stream_adds_up_to_the_whole_answer(
    client: openai.AsyncOpenAI, services: Services, extra: dict[str, Any]
) -> None:
    options: Any = {"model": "", "prompt": PROMPT, "max_tokens": 30, "seed": 4, **extra}
    whole = await client.completions.create(**options)
    texts = dict.fromkeys(range(len(whole.choices)), "")
    reasons: dict[int, str] = {}
    told: dict[int, list[float]] = {index: [] for index in texts}
    usages = []
    stream = await client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            assert choice.index not in reasons
            texts[choice.index] += choice.text
            told[choice.index] += choice.logprobs.token_logprobs or [] if choice.logprobs else []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert told == {
        choice.index: choice.logprobs.token_logprobs if choice.logprobs else [] for choice in whole.choices
    }
    *others, last = usages
    assert set(others) == {None}
    assert last is not None
    assert whole.usage is not None
    assert last.total_tokens == whole.usage.total_tokens
    await services.all_is_free()


async def test_chat_streams_add_up_to_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "", "messages": HELLO, "max_tokens": 30, "seed": 4, "n": 2}
    whole = await client.chat.completions.create(**options)
    texts, roles, reasons = {0: "", 1: ""}, [], {}
    async for chunk in await client.chat.completions.create(**options, stream=True):
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [(choice.index, choice.delta.role)] if choice.delta.role else []
        reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert sorted(roles) == [(0, "assistant"), (1, "assistant")]
    assert texts[0] != texts[1]


SEEDED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"extra_body": {"top_k": 20, "min_p": 0.02, "repetition_penalty": 1.3, "min_tokens": 20}},
    {"logit_bias": {"40": 3.0, "41": -100}, "stop": "q"},
]


@pytest.mark.parametrize("options", SEEDED, ids=str)
async def test_seeded_texts_are_those_of_grpc_whatever_is_drafted(
    client: openai.AsyncOpenAI, services: Services, options: dict[str, Any]
) -> None:
    sampling = {name: value for name, value in options.items() if name not in ("extra_body", "logit_bias")}
    sampling |= options.get("extra_body", {})
    if "stop" in sampling:
        sampling["stop"] = [sampling["stop"]]
    request = request_for(seed=2**63 + 5, max_tokens=40, **sampling)
    for token_id, bias in options.get("logit_bias", {}).items():
        request.sampling.logit_bias.add(token_id=int(token_id), bias=bias)
    by_grpc = await services.generate_one(speculating(request, 0, NGRAM))
    for mode in ("off", "on", "auto"):
        extra = options.get("extra_body", {}) | speculation(mode=mode, drafter="model", include_tokens=True)
        answer = await client.completions.create(
            model="", prompt=PROMPT, max_tokens=40, seed=2**63 + 5, **(options | {"extra_body": extra})
        )
        (choice,) = answer.choices
        assert choice.text == by_grpc.text
        assert [token["id"] for token in _extension(choice)["tokens"]] == by_grpc.ids


def _extension(told: Any) -> Any:
    return told.model_extra["speculative_decoding"]


async def test_metrics_tokens_and_rounds_tell_the_same_story(client: openai.AsyncOpenAI) -> None:
    options = speculation(mode="on", num_draft_tokens=4, include_tokens=True, include_rounds=True)
    answer = await client.chat.completions.create(
        model="", messages=HELLO, max_tokens=40, temperature=0, n=2, extra_body=options
    )
    metrics = answer.metrics["speculative_decoding"]  # type: ignore[attr-defined]
    told = [_extension(choice) for choice in answer.choices]
    tokens = [token for entry in told for token in entry["tokens"]]
    rounds = [entry for choice in told for entry in choice["rounds"]]
    drafted = [entry for entry in rounds if entry["num_drafted"]]
    assert answer.usage is not None
    assert len(tokens) == answer.usage.completion_tokens == metrics["num_emitted"]
    origins = [token["origin"] for token in tokens]
    assert {origin: origins.count(origin) for origin in ("accepted", "bonus", "recovered", "plain")} == {
        origin: metrics[f"num_{origin}"] for origin in ("accepted", "bonus", "recovered", "plain")
    }
    assert metrics["num_rounds"] == len(rounds)
    assert metrics["num_spec_steps"] == len(drafted) > 0
    assert metrics["num_draft_tokens"] == sum(entry["num_drafted"] for entry in drafted)
    accepted = [entry["num_accepted"] for entry in drafted]
    assert metrics["num_accepted_draft_tokens"] == sum(accepted)
    longest = max(entry["num_drafted"] for entry in drafted)
    assert metrics["acceptance_histogram"] == [accepted.count(n) for n in range(longest + 1)]
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + sum(accepted) / len(drafted))
    by_length = metrics["acceptance_histogram_by_draft_length"]
    assert {int(n): sum(c) for n, c in by_length.items()} == {
        n: [entry["num_drafted"] for entry in drafted].count(n) for n in map(int, by_length)
    }


async def test_nothing_is_told_of_speculation_that_was_not_asked_for(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="", prompt=PROMPT, max_tokens=4)
    assert "metrics" not in (answer.model_extra or {})
    assert "speculative_decoding" not in (answer.choices[0].model_extra or {})


async def test_chat_logprobs_are_the_models_own(
    client: openai.AsyncOpenAI, model: Path, tokenizer: Tokenizer
) -> None:
    answer = await client.chat.completions.create(
        model="",
        messages=HELLO,
        max_tokens=20,
        seed=3,
        logprobs=True,
        top_logprobs=3,
        extra_body=speculation(mode="on", include_tokens=True),
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    ids = [token["id"] for token in _extension(choice)["tokens"]]
    prompt = tokenizer.encode_chat(ChatPrompt((ChatMessage("user", "the fox"),)))
    rows = logprobs(model, prompt, ids)
    for row, token_id, told in zip(rows, ids, choice.logprobs.content, strict=True):
        assert told.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert told.bytes is not None
        assert bytes(told.bytes) == tokenizer.token_bytes(token_id)
        assert [top.logprob for top in told.top_logprobs] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )
    said = b"".join(bytes(told.bytes or ()) for told in choice.logprobs.content)
    if choice.finish_reason == "length":
        assert said.decode(errors="replace") == choice.message.content


async def test_completion_logprobs_point_into_the_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="", prompt=PROMPT, max_tokens=20, seed=3, logprobs=1)
    (choice,) = answer.choices
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.text_offset is not None
    assert told.top_logprobs is not None
    for token, offset, top in zip(told.tokens, told.text_offset, told.top_logprobs, strict=True):
        if "\ufffd" not in token:
            assert choice.text[offset : offset + len(token)] in (token, "")
        assert 1 <= len(top) <= 2
        assert token in top
        assert math.isfinite(top[token])


async def test_echo_says_the_prompt_first(client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    options: Any = {"model": "", "max_tokens": 5, "seed": 1, "echo": True}
    plain = await client.completions.create(model="", prompt=PROMPT, max_tokens=5, seed=1)
    text = PROMPT + plain.choices[0].text
    for prompt in (PROMPT, list(tokenizer.encode_text(PROMPT))):
        answer = await client.completions.create(prompt=prompt, **options)
        assert answer.choices[0].text == text
        stream = await client.completions.create(prompt=prompt, stream=True, **options)
        assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == text


async def test_many_prompts_are_answered_in_their_order(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    prompts = [PROMPT, "the lazy dog", "stop"]
    alone = [
        (await client.completions.create(model="", prompt=prompt, n=2, seed=1, max_tokens=10)).choices
        for prompt in prompts
    ]
    answer = await client.completions.create(model="", prompt=prompts, n=2, seed=1, max_tokens=10)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [c.text for choices in alone for c in choices]
    texts = dict.fromkeys(range(6), "")
    stream = await client.completions.create(
        model="", prompt=prompts, n=2, seed=1, max_tokens=10, stream=True
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in answer.choices]
    await services.all_is_free()


async def test_a_bad_prompt_among_many_stops_all_before_they_start(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    num_steps = services.target.num_steps
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="", prompt=[PROMPT, ""], max_tokens=10)
    assert caught.value.param == "prompt"
    assert services.target.num_steps == num_steps


async def test_the_served_model_is_listed(client: openai.AsyncOpenAI, model: Path) -> None:
    listed = [entry async for entry in client.models.list()]
    assert [entry.id for entry in listed] == [model.name]
    assert (await client.models.retrieve(model.name)).id == model.name
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4o")


async def test_tokens_go_both_ways(web: httpx2.AsyncClient, tokenizer: Tokenizer) -> None:
    text = "the fox \u4f60\u597d"
    told = (await web.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert told["tokens"] == list(tokenizer.encode_text(text))
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 256)
    assert len(told["token_strs"]) == told["count"]
    back = await web.post("/detokenize", json={"tokens": told["tokens"]})
    assert back.json() == {"prompt": text}
    chat = (await web.post("/tokenize", json={"messages": HELLO})).json()
    assert chat["tokens"] == list(tokenizer.encode_chat(ChatPrompt((ChatMessage("user", "the fox"),))))


async def test_health_and_version_are_told(web: httpx2.AsyncClient) -> None:
    health = await web.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert (await web.get("/version")).json()["version"]


async def test_metrics_count_what_was_emitted(client: openai.AsyncOpenAI, web: httpx2.AsyncClient) -> None:
    async def emitted() -> float:
        lines = (await web.get("/metrics")).text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("specdecode_num_emitted_tokens_total")
        )

    before = await emitted()
    await client.completions.create(
        model="", prompt=PROMPT, max_tokens=7, temperature=0, extra_body={"ignore_eos": True}
    )
    assert await emitted() == before + 7


async def test_fields_that_nobody_knows_are_named_and_ignored(client: openai.AsyncOpenAI) -> None:
    told = await client.completions.with_raw_response.create(
        model="",
        prompt=PROMPT,
        max_tokens=2,
        user="somebody",
        extra_body={"temprature": 0, "metadata": {"a": "b"}, "top_k": -1},
    )
    assert told.headers["x-specdecode-ignored"] == "temprature"
    hostile = {"a\r\nx-evil: 1": 1, "\u4f60": 2, "y" * 100: 3, "fine": 4}
    told = await client.completions.with_raw_response.create(
        model="", prompt=PROMPT, max_tokens=2, extra_body=hostile
    )
    assert told.headers["x-specdecode-ignored"] == ", ".join(["(another name)"] * 3 + ["fine"])
    assert "x-evil" not in told.headers
    quiet = await client.completions.with_raw_response.create(model="", prompt=PROMPT, max_tokens=2)
    assert "x-specdecode-ignored" not in quiet.headers


async def test_a_client_that_gives_up_takes_its_request_back(
    services: Services, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.05).completions.create(
            model="", prompt=PROMPT, max_tokens=250, n=16, extra_body={"ignore_eos": True}
        )
    await services.all_is_free()


async def test_origins_are_those_of_grpc(client: openai.AsyncOpenAI, services: Services) -> None:
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingOptions(temperature=0, max_tokens=30))
    off = await services.generate_one(speculating(request, 0, NGRAM))
    assert {token.origin for token in off.tokens} == {Origin.PLAIN}
    answer = await client.completions.create(
        model="",
        prompt=PROMPT,
        max_tokens=30,
        temperature=0,
        extra_body=speculation(mode="off", include_tokens=True),
    )
    told = _extension(answer.choices[0])["tokens"]
    assert json.dumps([token["id"] for token in told]) == json.dumps(off.ids)
    assert {token["origin"] for token in told} == {"plain"}
