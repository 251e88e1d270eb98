"""API keys on both fronts: who gets in, what the file holds, and what tenants see of each other."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from router.access import Caller
from specdecode.cli.app import app
from specdecode.client import RouterClient
from specdecode.errors import (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    Reason,
    ResourceExhaustedError,
    SpecdecodeError,
    UnauthenticatedError,
)
from specdecode.keys import KeyFile, KeyLimits, find_key, make_key, read_keys, write_keys
from specdecode.requests import (
    GenerateRequest,
    PolicyOptions,
    SamplingOptions,
    SpeculationMode,
    SpeculationOptions,
    TokenPrompt,
)
from specdecode.types import DrafterKind, Usage
from tests.services import DEADLINE, Services, eventually, start_drafts, start_router, start_target

LONG = tuple(range(20, 84))
SHORT = SamplingOptions(temperature=0.0, max_tokens=4, ignore_eos=True)


def add_key(file: Path, name: str, **options: Any) -> str:
    key, entry = make_key(name, **options)
    known = read_keys(file) if file.exists() else {}
    write_keys(file, {**known, entry.id: entry})
    return key


@asynccontextmanager
async def guarded(model: Path, keys: Path, **settings: Any) -> AsyncIterator[tuple[Services, str]]:
    """Services whose router asks for keys, and the router's address."""
    async with Services.started(model, keys_path=str(keys), **settings) as services:
        yield services, f"127.0.0.1:{services.router.running.server.port}"


async def usage_of(address: str, key: str | None, request: GenerateRequest) -> Usage:
    """What a request took."""
    async with await RouterClient.open(address, api_key=key) as client:
        pieces = [piece async for piece in client.generate(request, timeout_seconds=DEADLINE)]
    assert pieces[-1].usage is not None
    return pieces[-1].usage


async def error_of(address: str, key: str | None, request: GenerateRequest | None = None) -> SpecdecodeError:
    """What a request is refused with."""
    with pytest.raises(SpecdecodeError) as caught:
        await usage_of(address, key, request or GenerateRequest(TokenPrompt(LONG), SHORT))
    return caught.value


class TestFile:
    def test_holds_no_key_and_is_for_its_owner_alone(self, tmp_path: Path) -> None:
        file = tmp_path / "keys.json"
        key = add_key(file, "team-a")
        secret = key.split("-", 2)[2]
        assert secret not in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert find_key(key, read_keys(file)) is not None

    def test_equal_secrets_would_have_other_hashes(self) -> None:
        _, first = make_key("a")
        _, second = make_key("a")
        assert first.salt != second.salt
        assert len({first.hash, second.hash}) == 2

    @pytest.mark.parametrize("change", ["", "x", "-", "é", "\x00"])
    def test_only_the_whole_key_is_known(self, change: str) -> None:
        key, entry = make_key("a")
        known = {entry.id: entry}
        assert find_key(key, known) is entry
        assert find_key(key[:-1] + change, known) is None
        assert find_key(key + change, known) is (entry if not change else None)
        assert find_key(key.replace(entry.id, "0" * 12), known) is None

    @pytest.mark.parametrize(
        "content",
        [
            "",
            "{",
            "[]",
            '{"version": 2, "keys": []}',
            '{"version": 1}',
            '{"version": 1, "keys": [{"id": "a"}]}',
            '{"version": 1, "keys": [{"id":"a","name":"b","salt":"00","hash":"00","created":0}]}',
            '{"version": 1, "keys": [{"id":"a","name":"b","salt":"zz","hash":"00","created":0}]}',
        ],
    )
    def test_that_is_broken_is_refused_without_its_content(self, tmp_path: Path, content: str) -> None:
        file = tmp_path / "keys.json"
        file.write_text(content)
        with pytest.raises(InvalidArgumentError, match=r"keys_path: .*keys\.json"):
            read_keys(file)

    def test_that_is_not_there_is_refused_at_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="does not exist"):
            KeyFile(tmp_path / "nowhere.json")

    def test_that_breaks_or_goes_later_leaves_the_keys_before_in_force(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "keys.json"
        key = add_key(file, "a")
        keys = KeyFile(file)
        file.write_text("{")
        assert keys.find(key) is not None
        file.unlink()
        assert keys.find(key) is not None
        assert caplog.text.count("keys stay as they were") == 2
        other = add_key(file, "b")
        assert keys.find(key) is None
        assert keys.find(other) is not None


class TestCommands:
    def run(self, file: Path, *args: str) -> Any:
        return CliRunner().invoke(app, ["keys", *args, "--file", str(file)])

    def test_add_prints_a_key_that_works_and_list_shows_none(self, tmp_path: Path) -> None:
        file = tmp_path / "keys.json"
        added = self.run(file, "add", "team-a", "--admin", "--tokens-per-minute", "1000")
        key = added.stdout.strip()
        entry = find_key(key, read_keys(file))
        assert entry is not None
        assert (entry.admin, entry.limits.tokens_per_minute) == (True, 1000)
        listed = self.run(file, "list", "--json")
        assert json.loads(listed.stdout)["keys"][0]["name"] == "team-a"
        for shown in (listed.output, self.run(file, "list").output):
            assert entry.hash not in shown
            assert key.split("-", 2)[2] not in shown

    def test_remove_takes_one_key_out(self, tmp_path: Path) -> None:
        file = tmp_path / "keys.json"
        first, second = (self.run(file, "add", "a").stdout.strip() for _ in range(2))
        assert self.run(file, "remove", first.split("-")[1]).exit_code == 0
        known = read_keys(file)
        assert find_key(first, known) is None
        assert find_key(second, known) is not None
        assert self.run(file, "remove", "0" * 12).exit_code == 1

    @pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "ü"])
    def test_names_that_logs_could_not_hold_are_refused(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / "keys.json"
        assert self.run(file, "add", "--", name).exit_code != 0
        assert not file.exists()


class TestFronts:
    async def test_without_a_known_key_nothing_is_answered(
        self, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = tmp_path / "keys.json"
        key = add_key(keys, "a")
        stranger, _ = make_key("a")
        async with guarded(model, keys, http_port=0) as (services, address):
            for wrong, reason in ((None, Reason.API_KEY_MISSING), (stranger, Reason.API_KEY_INVALID)):
                error = await error_of(address, wrong)
                assert isinstance(error, UnauthenticatedError)
                assert error.reason is reason
                async with await RouterClient.open(address, api_key=wrong) as client:
                    for ask in (client.get_status, client.get_figures, client.get_policy):
                        with pytest.raises(UnauthenticatedError):
                            await ask()
            assert (await usage_of(address, key, GenerateRequest(TokenPrompt(LONG), SHORT))).num_emitted == 4
            async with httpx2.AsyncClient(base_url=services.router.url, timeout=DEADLINE) as web:
                await self.check_http(web, key, stranger)
            health = health_pb2_grpc.HealthStub(services.router.channel)
            assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE)).status == 1
        assert stranger not in caplog.text
        assert stranger.split("-", 2)[2] not in caplog.text

    async def check_http(self, web: httpx2.AsyncClient, key: str, stranger: str) -> None:
        body = {"prompt": "the fox", "max_tokens": 4}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = await web.post(path, json=body)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/specdecode/state", "/specdecode/plan"):
            assert (await web.get(path)).status_code == 401, path
        bad = await web.post("/v1/completions", json=body, headers={"authorization": f"Bearer {stranger}"})
        assert (bad.status_code, bad.json()["error"]["code"]) == (401, "invalid_api_key")
        good = await web.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert good.status_code == 200
        assert (await web.get("/health")).status_code == 200

    async def test_keys_come_and_go_without_a_restart_while_calls_run(
        self, model: Path, tmp_path: Path
    ) -> None:
        keys = tmp_path / "keys.json"
        old = add_key(keys, "a")
        async with guarded(model, keys) as (services, address):
            long = GenerateRequest(
                TokenPrompt(LONG), SamplingOptions(temperature=0.0, max_tokens=150, ignore_eos=True)
            )
            async with await RouterClient.open(address, api_key=old) as client:
                pieces = client.generate(long, timeout_seconds=DEADLINE)
                first = await anext(pieces)
                new = add_key(keys, "a")
                write_keys(keys, {find.id: find for find in read_keys(keys).values() if find.id in new})
                assert isinstance(await error_of(address, old), UnauthenticatedError)
                assert (await usage_of(address, new, long)).num_emitted == 150
                rest = [piece async for piece in pieces]
            assert sum(len(piece.tokens) for piece in (first, *rest)) == 150
            await services.all_is_free()

    async def test_only_admins_change_the_policy(self, model: Path, tmp_path: Path) -> None:
        keys = tmp_path / "keys.json"
        user, admin = add_key(keys, "a"), add_key(keys, "a", admin=True)
        async with guarded(model, keys) as (_, address):
            async with await RouterClient.open(address, api_key=user) as client:
                with pytest.raises(PermissionDeniedError):
                    await client.set_policy(PolicyOptions(enabled=False))
                assert (await client.get_policy()).enabled
            async with await RouterClient.open(address, api_key=admin) as client:
                assert not (await client.set_policy(PolicyOptions(enabled=False))).enabled


class TestTenants:
    async def test_no_tenant_finds_what_anothers_prompts_left_in_the_prefix_cache(
        self, model: Path, tmp_path: Path
    ) -> None:
        keys = tmp_path / "keys.json"
        a, again, b = add_key(keys, "a"), add_key(keys, "a"), add_key(keys, "b")
        request = GenerateRequest(TokenPrompt(LONG), SHORT)
        async with guarded(model, keys) as (_, address):
            assert (await usage_of(address, a, request)).num_cached_tokens == 0
            assert (await usage_of(address, b, request)).num_cached_tokens == 0
            assert (await usage_of(address, a, request)).num_cached_tokens > 0
            assert (await usage_of(address, again, request)).num_cached_tokens > 0

    async def test_caches_are_shared_where_the_operator_says_so(self, model: Path, tmp_path: Path) -> None:
        keys = tmp_path / "keys.json"
        a, b = add_key(keys, "a"), add_key(keys, "b")
        request = GenerateRequest(TokenPrompt(LONG), SHORT)
        async with guarded(model, keys, partition_caches=False) as (_, address):
            await usage_of(address, a, request)
            assert (await usage_of(address, b, request)).num_cached_tokens > 0

    @pytest.mark.parametrize("asked", [b"", b"x", b"other"])
    def test_no_salt_of_a_client_makes_it_another_tenant(self, asked: bytes) -> None:
        a, b = (Caller("k", name, has_own_caches=True) for name in ("a", "b"))
        assert a.salt(asked) != b.salt(asked)
        assert b.salt(a.salt(asked)) != a.salt(asked)
        assert a.salt(asked) != a.salt(asked + b"y")
        assert Caller().salt(asked) == asked

    async def test_no_tenant_is_drafted_for_from_anothers_outputs(self, model: Path, tmp_path: Path) -> None:
        keys = tmp_path / "keys.json"
        a, b = add_key(keys, "a"), add_key(keys, "b")
        target, drafts = await start_target(model), await start_drafts(None, suffix_tokens=10_000)
        router = await start_router(
            model, [target.address], drafts.address, keys_path=str(keys), draft_deadline_seconds=30.0
        )
        suffix = SpeculationOptions(
            mode=SpeculationMode.ON, num_draft_tokens=8, drafter=DrafterKind.SUFFIX, traffic_class="t"
        )
        request = GenerateRequest(
            TokenPrompt(LONG[:9]), SamplingOptions(temperature=0.0, max_tokens=40, ignore_eos=True), suffix
        )
        address = f"127.0.0.1:{router.running.server.port}"
        try:
            async with await RouterClient.open(address, api_key=a) as client:

                async def drafts_are_there() -> bool:
                    return (await client.get_status()).drafts[0].connected

                await eventually(drafts_are_there, "the draft service is there")
            first = await usage_of(address, a, request)
            await drafts.all_is_free()
            others = await usage_of(address, b, request)
            await drafts.all_is_free()
            own = await usage_of(address, a, request)
        finally:
            await router.stop()
            await drafts.stop()
            await target.stop()
        assert own.num_accepted > first.num_accepted
        assert others.num_accepted == first.num_accepted


class TestLimits:
    async def test_requests_above_a_keys_rate_are_told_when_to_come_back(
        self, model: Path, tmp_path: Path
    ) -> None:
        keys = tmp_path / "keys.json"
        limited = add_key(keys, "a", limits=KeyLimits(requests_per_minute=2))
        free = add_key(keys, "b")
        request = GenerateRequest(TokenPrompt(LONG), SHORT)
        async with guarded(model, keys, http_port=0) as (services, address):
            await usage_of(address, limited, request)
            await usage_of(address, limited, request)
            error = await error_of(address, limited, request)
            assert isinstance(error, ResourceExhaustedError)
            assert error.reason is Reason.RATE_LIMITED
            assert error.retry_after is not None
            assert 0 < error.retry_after <= 30
            async with httpx2.AsyncClient(base_url=services.router.url, timeout=DEADLINE) as web:
                headers = {"authorization": f"Bearer {limited}"}
                body = {"prompt": "the fox", "max_tokens": 4}
                answer = await web.post("/v1/completions", json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            await usage_of(address, free, request)

    async def test_tokens_above_a_keys_rate_delay_the_next_request(self, model: Path, tmp_path: Path) -> None:
        keys = tmp_path / "keys.json"
        key = add_key(keys, "a", limits=KeyLimits(tokens_per_minute=60))
        async with guarded(model, keys) as (_, address):
            used = await usage_of(address, key, GenerateRequest(TokenPrompt(LONG), SHORT))
            assert used.num_prompt_tokens + used.num_emitted == 68
            error = await error_of(address, key)
        assert error.reason is Reason.RATE_LIMITED
        assert error.retry_after is not None
        assert 5 < error.retry_after <= 9  # eight tokens overdrawn, one more to begin, one a second

    async def test_requests_at_once_are_counted_down_when_clients_go(
        self, model: Path, tmp_path: Path
    ) -> None:
        keys = tmp_path / "keys.json"
        key = add_key(keys, "a", limits=KeyLimits(requests_at_once=1))
        async with guarded(model, keys) as (services, address):
            long = GenerateRequest(TokenPrompt(LONG), SamplingOptions(max_tokens=180, ignore_eos=True))
            async with await RouterClient.open(address, api_key=key) as client:
                pieces = client.generate(long, timeout_seconds=DEADLINE)
                await anext(pieces)
                assert (await error_of(address, key)).reason is Reason.RATE_LIMITED
                await pieces.aclose()
            await services.all_is_free()
            for _ in range(3):
                await usage_of(address, key, GenerateRequest(TokenPrompt(LONG), SHORT))

    async def test_neither_a_refusal_nor_the_log_says_a_key(
        self, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = tmp_path / "keys.json"
        key = add_key(keys, "a", limits=KeyLimits(requests_per_minute=1))
        caplog.set_level("DEBUG")
        async with guarded(model, keys) as (_, address):
            await usage_of(address, key, GenerateRequest(TokenPrompt(LONG), SHORT))
            error = await error_of(address, key)
        secret = key.split("-", 2)[2]
        assert secret not in error.message + caplog.text


async def test_metadata_that_is_not_text_is_no_key(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    add_key(keys, "a")
    async with guarded(model, keys) as (services, _):
        call = services.router.channel.unary_unary("/specdecode.v1.RouterService/GetStatus")(
            b"", timeout=DEADLINE, metadata=(("authorization", "Bearer " + "x" * 20_000),)
        )
        assert await asyncio.wait_for(call.code(), DEADLINE) is grpc.StatusCode.UNAUTHENTICATED
