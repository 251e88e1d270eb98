"""TLS on every hop, with certificates made for the test: who is believed, who is refused, in which words."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.replicas import Listener, TargetLink
from specdecode.client import RouterClient
from specdecode.config import RouterSettings, TargetSettings, read_settings
from specdecode.errors import InvalidArgumentError, PermissionDeniedError, UnavailableError
from specdecode.requests import GenerateRequest, SamplingOptions, TextPrompt
from specdecode.serving import Server, connect, error_from_rpc
from specdecode.tls import ClientTls, Exposure, ServerTls
from specdecode.v1 import target_service_pb2 as pb
from specdecode.v1 import target_service_pb2_grpc as pb_grpc
from tests.router.client import MODEL, request_for, speculating
from tests.secure.certificates import Authority, Pair
from tests.services import DEADLINE, Services, eventually, start_drafts, start_router, start_target

NAME = "specdecode.v1.TargetService"
MAX_MESSAGE_BYTES = 1 << 20


class Servicer(pb_grpc.TargetServiceServicer):
    async def GetTargetModel(self, request: Any, context: Any) -> Any:
        return pb.GetTargetModelResponse()

    async def Decode(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for frame in requests:
            yield pb.DecodeResponse(step=len(frame.closes))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.sign("target")


@asynccontextmanager
async def serving(exposure: Exposure) -> AsyncIterator[Server]:
    server = Server((NAME,), MAX_MESSAGE_BYTES, exposure)
    pb_grpc.add_TargetServiceServicer_to_server(Servicer(), server.grpc)
    try:
        await server.start("127.0.0.1", 0)
        server.set_serving()
        yield server
    finally:
        await server.drain(None)


def exposed(pair: Pair, client_ca: str | None = None, names: tuple[str, ...] = ()) -> Exposure:
    return Exposure(ServerTls(pair.cert, pair.key, client_ca, names))


async def ask(server: Server, tls: ClientTls | None) -> Any:
    async with connect(f"127.0.0.1:{server.port}", MAX_MESSAGE_BYTES, tls) as channel:
        return await pb_grpc.TargetServiceStub(channel).GetTargetModel(
            pb.GetTargetModelRequest(), timeout=DEADLINE
        )


async def reflected(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """How a call of the reflection service ends."""
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    return await stub.ServerReflectionInfo(iter([asked]), timeout=DEADLINE).code()


def replaced(path: str, data: bytes) -> None:
    """New content for a file, all at once."""
    new = Path(f"{path}.new")
    new.write_bytes(data)
    new.replace(path)


def content(path: str) -> bytes:
    """What a file holds."""
    return Path(path).read_bytes()


async def refusal_of(server: Server, tls: ClientTls | None) -> str:
    """What a client of ours says when it can't get through."""
    with pytest.raises(UnavailableError) as caught:
        await RouterClient.open(f"127.0.0.1:{server.port}", tls=tls)
    assert "Traceback" not in caught.value.message
    return caught.value.message


class TestServers:
    async def test_whoever_knows_the_authority_is_answered(self, authority: Authority, pair: Pair) -> None:
        async with serving(exposed(pair)) as server:
            assert await ask(server, ClientTls(authority.file)) == pb.GetTargetModelResponse()

    async def test_the_name_in_the_certificate_must_be_the_one_expected(
        self, authority: Authority, pair: Pair
    ) -> None:
        async with serving(exposed(pair)) as server:
            await ask(server, ClientTls(authority.file, server_name="target"))
            other = ClientTls(authority.file, server_name="another")
            assert "Hostname mismatch" in await refusal_of(server, other)

    async def test_another_authority_is_not_believed(self, tmp_path: Path, pair: Pair) -> None:
        stranger = Authority(tmp_path, "stranger")
        async with serving(exposed(pair)) as server:
            said = await refusal_of(server, ClientTls(stranger.file))
        assert "its certificate is not believed: unable to get local issuer certificate" in said

    async def test_an_expired_certificate_is_named_so(self, authority: Authority) -> None:
        expired = authority.sign("target", valid=timedelta(days=-1))
        async with serving(exposed(expired)) as server:
            said = await refusal_of(server, ClientTls(authority.file))
        assert "its certificate is not believed: certificate has expired" in said

    async def test_plaintext_to_a_port_with_tls_is_told_so(self, pair: Pair) -> None:
        async with serving(exposed(pair)) as server:
            assert "it speaks TLS; name the authority" in await refusal_of(server, None)

    async def test_tls_to_a_plaintext_port_is_told_so(self, authority: Authority) -> None:
        async with serving(Exposure()) as server:
            assert "it does not speak TLS" in await refusal_of(server, ClientTls(authority.file))

    @pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
    async def test_old_versions_of_tls_are_refused(self, pair: Pair) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        async with serving(exposed(pair)) as server:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname="target")


class TestCallers:
    async def test_without_a_certificate_nobody_gets_in(self, authority: Authority, pair: Pair) -> None:
        async with serving(exposed(pair, authority.file)) as server:
            said = await refusal_of(server, ClientTls(authority.file))
        assert "it asks for a certificate, it seems, and none was shown" in said

    async def test_a_certificate_of_another_authority_does_not_get_in(
        self, tmp_path: Path, authority: Authority, pair: Pair
    ) -> None:
        own = Authority(tmp_path, "stranger").sign("router")
        async with serving(exposed(pair, authority.file)) as server:
            said = await refusal_of(server, ClientTls(authority.file, own.cert, own.key))
        assert "it does not believe the certificate that was shown" in said

    async def test_an_expired_certificate_does_not_get_in(self, authority: Authority, pair: Pair) -> None:
        own = authority.sign("router", valid=timedelta(days=-1))
        async with serving(exposed(pair, authority.file)) as server:
            said = await refusal_of(server, ClientTls(authority.file, own.cert, own.key))
        assert "does not believe the certificate that was shown: another authority's, or expired" in said

    async def test_only_names_that_may_call_are_answered(self, authority: Authority, pair: Pair) -> None:
        router, guest = authority.sign("router"), authority.sign("guest")
        async with serving(exposed(pair, authority.file, ("router",))) as server:
            await ask(server, ClientTls(authority.file, router.cert, router.key))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(server, ClientTls(authority.file, guest.cert, guest.key))
            assert isinstance(error_from_rpc(caught.value), PermissionDeniedError)

    async def test_streams_and_reflection_of_other_names_are_refused_too(
        self, authority: Authority, pair: Pair
    ) -> None:
        guest = authority.sign("guest")
        tls = ClientTls(authority.file, guest.cert, guest.key)
        async with (
            serving(exposed(pair, authority.file, ("router",))) as server,
            connect(f"127.0.0.1:{server.port}", MAX_MESSAGE_BYTES, tls) as channel,
        ):
            call = pb_grpc.TargetServiceStub(channel).Decode(timeout=DEADLINE)
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
            assert await reflected(channel) is grpc.StatusCode.PERMISSION_DENIED

    async def test_streams_of_names_that_may_call_work(self, authority: Authority, pair: Pair) -> None:
        router = authority.sign("router")
        tls = ClientTls(authority.file, router.cert, router.key)
        async with (
            serving(exposed(pair, authority.file, ("router",))) as server,
            connect(f"127.0.0.1:{server.port}", MAX_MESSAGE_BYTES, tls) as channel,
        ):
            call = pb_grpc.TargetServiceStub(channel).Decode(timeout=DEADLINE)
            await call.write(pb.DecodeRequest(closes=[1, 2]))
            assert (await call.read()).step == 2
            call.cancel()


class TestNewCertificates:
    async def test_are_used_without_a_restart_while_open_connections_go_on(
        self, tmp_path: Path, authority: Authority, pair: Pair
    ) -> None:
        successor = Authority(tmp_path, "successor")
        async with (
            serving(exposed(pair)) as server,
            connect(f"127.0.0.1:{server.port}", MAX_MESSAGE_BYTES, ClientTls(authority.file)) as before,
        ):
            call = pb_grpc.TargetServiceStub(before).Decode(timeout=DEADLINE)
            await call.write(pb.DecodeRequest(closes=[1]))
            assert (await call.read()).step == 1
            successor.sign("target")  # replaces the files
            await ask(server, ClientTls(successor.file))
            assert "not believed" in await refusal_of(server, ClientTls(authority.file))
            await call.write(pb.DecodeRequest(closes=[1, 2]))
            assert (await call.read()).step == 2

    async def test_that_can_not_be_used_leave_those_before_in_use(
        self, authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "specdecode.tls")
        async with serving(exposed(pair)) as server:
            replaced(pair.cert, b"half a certifi")
            await ask(server, ClientTls(authority.file))
            await ask(server, ClientTls(authority.file))
            told = [record for record in caplog.records if "are not used" in record.message]
            assert len(told) == 1  # not once a connection
            authority.sign("target")
            await ask(server, ClientTls(authority.file))
        assert "were read anew" in caplog.text

    async def test_of_callers_authorities_shut_out_whom_the_old_one_let_in(
        self, tmp_path: Path, authority: Authority, pair: Pair
    ) -> None:
        own = authority.sign("router")
        tls = ClientTls(authority.file, own.cert, own.key)
        ca, other = str(tmp_path / "clients.pem"), Authority(tmp_path, "other")
        replaced(ca, content(authority.file))
        async with serving(exposed(pair, ca)) as server:
            await ask(server, tls)
            replaced(ca, content(other.file))
            assert "does not believe the certificate" in await refusal_of(server, tls)


PAIR = ("--tls-cert=a", "--tls-key=b")


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (("--tls-cert=a",), "tls_cert and tls_key belong together"),
            (("--tls-client-ca=a",), "tls_client_ca needs tls_cert"),
            ((*PAIR, "--tls-client-names=c"), "tls_client_names needs tls_client_ca"),
            ((*PAIR, "--tls-client-ca=c", "--tls-client-names=d,"), "a name is empty"),
        ],
    )
    def test_that_do_not_fit_together_are_refused(self, options: tuple[str, ...], said: str) -> None:
        with pytest.raises(InvalidArgumentError, match=said):
            read_settings(TargetSettings, options)

    def test_of_the_mesh_need_its_authority(self) -> None:
        with pytest.raises(InvalidArgumentError, match="need mesh_ca"):
            read_settings(RouterSettings, ("--mesh-cert=a", "--mesh-key=b"))

    async def test_missing_files_are_named(self, tmp_path: Path, pair: Pair) -> None:
        lost = str(tmp_path / "nowhere.pem")
        for tls, field in (
            (ServerTls(lost, pair.key), "tls_cert"),
            (ServerTls(pair.cert, lost), "tls_key"),
            (ServerTls(pair.cert, pair.key, lost), "tls_client_ca"),
        ):
            server = Server((NAME,), MAX_MESSAGE_BYTES, Exposure(tls))
            with pytest.raises(InvalidArgumentError, match=rf"{field}: .*nowhere.pem can't be read"):
                await server.start("127.0.0.1", 0)

    async def test_a_key_of_another_certificate_is_refused(self, authority: Authority, pair: Pair) -> None:
        other = authority.sign("other")
        server = Server((NAME,), MAX_MESSAGE_BYTES, Exposure(ServerTls(pair.cert, other.key)))
        with pytest.raises(InvalidArgumentError, match="can't be used together: key values mismatch"):
            await server.start("127.0.0.1", 0)


class TestHealthAndReflection:
    async def test_health_is_told_in_plaintext_beside_tls(self, authority: Authority, pair: Pair) -> None:
        exposure = replace(exposed(pair, authority.file), health_port=0)
        async with (
            serving(exposure) as server,
            connect(f"127.0.0.1:{server.health_port}", MAX_MESSAGE_BYTES) as channel,
        ):
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=DEADLINE)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pb_grpc.TargetServiceStub(channel).GetTargetModel(
                    pb.GetTargetModelRequest(), timeout=DEADLINE
                )
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_reflection_can_be_closed(self) -> None:
        async with (
            serving(Exposure(reflection=False)) as server,
            connect(f"127.0.0.1:{server.port}", MAX_MESSAGE_BYTES) as channel,
        ):
            assert await reflected(channel) is grpc.StatusCode.UNIMPLEMENTED


def nothing(*_: Any) -> None:
    return None


class TestThreeServices:
    async def test_text_is_the_same_over_mutual_tls_and_nobody_else_gets_in(
        self, model: Path, authority: Authority
    ) -> None:
        own = {"tls_client_ca": authority.file, "tls_client_names": ("router",)}
        pairs = {name: authority.sign(name) for name in ("target", "draft", "router", "public")}
        inner = {
            name: {"tls_cert": pairs[name].cert, "tls_key": pairs[name].key, **own}
            for name in ("target", "draft")
        }
        target = await start_target(model, **inner["target"])
        drafts = await start_drafts(model, **inner["draft"])
        mesh = {
            "mesh_ca": authority.file,
            "mesh_cert": pairs["router"].cert,
            "mesh_key": pairs["router"].key,
            "tls_cert": pairs["public"].cert,
            "tls_key": pairs["public"].key,
        }
        tls = ClientTls(authority.file)
        router = await start_router(model, [target.address], drafts.address, tls, **mesh)
        request = speculating(request_for(temperature=0, max_tokens=24), 4, MODEL)
        services = Services(model, router, [target], drafts, model, {})
        try:
            await services.draft_is(True)
            answer = await services.generate_one(request)
            assert any(record.num_drafted for record in answer.rounds)
            asked = GenerateRequest(
                TextPrompt("the quick brown fox"), SamplingOptions(temperature=0, max_tokens=24)
            )
            address = f"127.0.0.1:{router.running.server.port}"
            async with await RouterClient.open(address, tls=tls) as client:
                text = "".join([piece.text async for piece in client.generate(asked)])
            for server in (target.server, drafts.server):
                assert "none was shown" in await refusal_of(server, tls)
                other = ClientTls(authority.file, pairs["public"].cert, pairs["public"].key)
                async with connect(f"127.0.0.1:{server.port}", MAX_MESSAGE_BYTES, other) as channel:
                    check = health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(), timeout=DEADLINE
                    )
                    assert await check.code() is grpc.StatusCode.PERMISSION_DENIED
        finally:
            await router.stop()
            await target.stop()
            await drafts.stop()
        async with Services.started(model) as plain:
            assert (await plain.generate_one(request)).text == answer.text == text

    async def test_a_router_without_the_mesh_identity_says_why_it_has_no_target(
        self, model: Path, authority: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        pair = authority.sign("target")
        exposure = exposed(pair, authority.file)
        async with serving(exposure) as server:
            link = TargetLink(
                f"127.0.0.1:{server.port}",
                MAX_MESSAGE_BYTES,
                "",
                Listener(nothing, nothing, nothing),
                ClientTls(authority.file),
            )
            with caplog.at_level("INFO", "router.replicas"):
                running = asyncio.create_task(link.run())
                await eventually(lambda: "it asks for a certificate, it seems" in caplog.text, "it says so")
            assert not link.up
            running.cancel()


class TestHttp:
    @pytest.fixture
    async def address(self, model: Path, authority: Authority, pair: Pair) -> AsyncIterator[str]:
        """Of an HTTP front with TLS that asks for certificates."""
        settings = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": authority.file}
        own = authority.sign("client")
        target = await start_target(model)
        router = await start_router(
            model,
            [target.address],
            None,
            ClientTls(authority.file, own.cert, own.key),
            http_port=0,
            **settings,
        )
        try:
            yield router.url.replace("http://", "https://")
        finally:
            await router.stop()
            await target.stop()

    def context(self, ca: str, own: Pair | None = None) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=ca)
        if own is not None:
            made.load_cert_chain(own.cert, own.key)
        return made

    async def ask(self, address: str, context: ssl.SSLContext) -> int:
        async with httpx2.AsyncClient(base_url=address, verify=context, timeout=DEADLINE) as web:
            return (await web.get("/health")).status_code

    async def test_is_secured_by_the_same_certificates_which_are_exchanged_without_a_restart(
        self, address: str, tmp_path: Path, authority: Authority, pair: Pair
    ) -> None:
        own = authority.sign("client")
        assert await self.ask(address, self.context(authority.file, own)) == 200
        for refused in (self.context(authority.file), self.context(Authority(tmp_path, "x").file, own)):
            with pytest.raises(httpx2.TransportError):
                await self.ask(address, refused)
        with pytest.raises(httpx2.TransportError):
            await self.ask(address.replace("https://", "http://"), self.context(authority.file))
        replaced(pair.cert, b"half a certifi")
        assert await self.ask(address, self.context(authority.file, own)) == 200
        successor = Authority(tmp_path, "successor")
        successor.sign("target")
        assert await self.ask(address, self.context(successor.file, own)) == 200

    def test_names_of_callers_that_it_can_not_check_are_refused(self) -> None:
        with pytest.raises(InvalidArgumentError, match="tls_client_names holds for gRPC alone"):
            read_settings(RouterSettings, (*PAIR, "--tls-client-ca=c", "--tls-client-names=d"))
