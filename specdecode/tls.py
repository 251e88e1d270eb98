"""TLS of servers and channels: certificates from files, read again when they change; failures in words.

A server looks at its files at each handshake, a channel when it is made, so new certificates need no restart:
put the new files in place of the old ones. What can't be used (half written, a key of another certificate) is
logged, and the certificates before it stay in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from specdecode.errors import InvalidArgumentError, PermissionDeniedError

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 2.0

Abort = Callable[[grpc.aio.ServicerContext[Any, Any], PermissionDeniedError], Awaitable[None]]


@dataclass(frozen=True)
class ServerTls:
    """How a server shows itself, and whom it answers; paths of PEM files.

    Attributes:
        cert: certificate, with those between it and the authority.
        key: its private key.
        client_ca: authorities of callers' certificates; None asks callers for none.
        client_names: who may call, by a name of the certificate; empty for all that `client_ca` has signed.
    """

    cert: str
    key: str
    client_ca: str | None = None
    client_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exposure:
    """What a server shows, and to whom.

    Attributes:
        tls: None: plaintext.
        reflection: whether anybody may list its methods and messages.
        health_port: where health is told in plaintext beside, to probes that have no certificate; None:
            nowhere.
        max_streams: calls at once on one connection; more wait in the caller.
    """

    tls: ServerTls | None = None
    reflection: bool = True
    health_port: int | None = None
    max_streams: int = 2048


@dataclass(frozen=True)
class ClientTls:
    """Whom a channel believes, and how it shows itself; paths of PEM files.

    Attributes:
        ca: authorities of servers' certificates; None takes the system's.
        cert: own certificate, for servers that ask for one.
        key: its private key.
        server_name: the name expected in servers' certificates; None: the host of the address.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None


@dataclass(frozen=True)
class _Pem:
    """What was read from a server's files, and the state of the files then."""

    state: tuple[tuple[int, int, int], ...]
    key: bytes
    cert: bytes
    client_ca: bytes | None

    def configuration(self) -> Any:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.client_ca)


class ServerCertificates:
    """A server's certificates, as its files hold them now.

    Attributes:
        credentials: for `add_secure_port`; must live as long as the server.

    Raises:
        InvalidArgumentError: a file can't be read, or they don't belong together.
    """

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._pem = _read(tls)
        self._failed: object = None
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._pem.configuration(), self._changed, require_client_authentication=tls.client_ca is not None
        )

    def _changed(self) -> Any:
        """The new configuration, None while nothing has changed; called by gRPC at each handshake."""
        try:
            state = _state(self._tls)
            if state in (self._pem.state, self._failed):
                return None
            pem = _read(self._tls)
            if pem.state != state:
                return None  # being written; the next handshake looks again
        except (InvalidArgumentError, OSError) as error:
            self._complain(error)
            return None
        self._pem, self._failed = pem, None
        logger.info("certificates were read anew from %s", self._tls.cert)
        return pem.configuration()

    def _complain(self, error: InvalidArgumentError | OSError) -> None:
        with contextlib.suppress(OSError):
            self._failed = _state(self._tls)
        logger.error("new certificates are not used, those before stay: %s", error)


def _files(tls: ServerTls) -> list[str]:
    return [path for path in (tls.cert, tls.key, tls.client_ca) if path is not None]


def _state(tls: ServerTls) -> tuple[tuple[int, int, int], ...]:
    found = map(os.stat, _files(tls))
    return tuple((entry.st_mtime_ns, entry.st_ino, entry.st_size) for entry in found)


def _read(tls: ServerTls) -> _Pem:
    cert, key = read_file("tls_cert", tls.cert), read_file("tls_key", tls.key)
    ca = None if tls.client_ca is None else read_file("tls_client_ca", tls.client_ca)
    _check_pair("tls_cert", tls.cert, tls.key)
    _check_ca("tls_client_ca", tls.client_ca)
    return _Pem(_state(tls), key, cert, ca)


def read_file(field: str, path: str) -> bytes:
    """A file that an option names.

    Raises:
        InvalidArgumentError: it can't be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidArgumentError.of(field, f"{path} can't be read: {error.strerror}") from None


def _check_pair(field: str, cert: str, key: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ssl.SSLError, ValueError) as error:
        reason = _reason(error)
        raise InvalidArgumentError.of(field, f"{cert} and {key} can't be used together: {reason}") from None


def _check_ca(field: str, path: str | None) -> None:
    if path is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgumentError.of(field, f"{path} holds no certificates: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").replace("_", " ").lower()
    return str(error)


class ServerContexts:
    """A server's certificates as `ServerCertificates` has them, for servers on Python's own TLS.

    Attributes:
        context: what to listen with; each handshake goes on with the files as they are then.

    Raises:
        InvalidArgumentError: a file can't be read, or they don't belong together.
    """

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._state = _state_or_none(tls)
        self.context = self._current = _server_context(tls)
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        state = _state_or_none(self._tls)
        if state != self._state:
            self._state = state
            try:
                self._current = _server_context(self._tls)
            except InvalidArgumentError as error:
                logger.error("new certificates are not used, those before stay: %s", error)
            else:
                logger.info("certificates were read anew from %s", self._tls.cert)
        connection.context = self._current


def _state_or_none(tls: ServerTls) -> tuple[tuple[int, int, int], ...] | None:
    try:
        return _state(tls)
    except OSError:
        return None


def _server_context(tls: ServerTls) -> ssl.SSLContext:
    _read(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.cert, tls.key, password="")
    if tls.client_ca is not None:
        context.load_verify_locations(tls.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


# Channels


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Credentials of a channel, from the files as they are now.

    Raises:
        InvalidArgumentError: a file can't be read, or they don't belong together.
    """
    ca = None if tls.ca is None else read_file("tls_ca", tls.ca)
    _check_ca("tls_ca", tls.ca)
    if tls.cert is None or tls.key is None:
        return grpc.ssl_channel_credentials(ca)
    _check_pair("tls_cert", tls.cert, tls.key)
    cert, key = read_file("tls_cert", tls.cert), read_file("tls_key", tls.key)
    return grpc.ssl_channel_credentials(ca, key, cert)


def channel_options(tls: ClientTls) -> list[tuple[str, str]]:
    """Options of a channel beside its credentials."""
    return [] if tls.server_name is None else [("grpc.ssl_target_name_override", tls.server_name)]


_PRIVATE_DOMAINS = ("localhost", "local", "internal", "svc", "lan", "home.arpa")


def is_private(address: str) -> bool:
    """Whether host:port names something that is not on the public internet, as far as the name tells."""
    host = address.removeprefix("dns:///").rpartition(":")[0].strip("[]").lower().rstrip(".")
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith(tuple(f".{domain}" for domain in _PRIVATE_DOMAINS))


# Who calls


class NamedCallers(grpc.aio.ServerInterceptor):
    """Refuses calls whose certificate has none of `names`; where only the authority counts, TLS itself does.

    Args:
        abort: ends a call with an error.
    """

    def __init__(self, names: Sequence[str], abort: Abort) -> None:
        self._names = frozenset(names)
        self._abort = abort

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """The method's handler, behind the check."""
        handler = await continuation(details)
        return None if handler is None else self._guarded(handler)

    def _guarded(self, handler: Any) -> Any:
        """The same handler; gRPC has one constructor for each kind of call."""
        serializers = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._checked(handler.unary_unary), *serializers)
        if handler.unary_stream is not None:
            checked = self._checked_stream(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(checked, *serializers)
        if handler.stream_stream is not None:
            checked = self._checked_stream(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(checked, *serializers)
        return grpc.stream_unary_rpc_method_handler(self._checked(handler.stream_unary), *serializers)

    def _checked(self, method: Any) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._check(context)
            return await method(request, context)

        return call

    def _checked_stream(self, method: Any) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._check(context)
            async for response in method(request, context):
                yield response

        return call

    async def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        names = names_of(context)
        if self._names.isdisjoint(names):
            logger.warning("a call by %s was refused: it is not among tls_client_names", names or "nobody")
            await self._abort(context, PermissionDeniedError("this caller's certificate may not call here"))


def names_of(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, ...]:
    """Names in the certificate of whoever calls; none where no certificate was shown."""
    shown = context.auth_context()
    values = (*shown.get("x509_subject_alternative_name", ()), *shown.get("x509_common_name", ()))
    return tuple(value.decode(errors="replace") for value in values)


# What goes wrong


async def why_refused(address: str, tls: ClientTls | None) -> str | None:
    """What is wrong with TLS at an address that gRPC can't talk to; None if it is something else.

    gRPC says little: an attempt of our own, without gRPC, tells whose certificate is not believed and why.
    """
    host, _, port = address.removeprefix("dns:///").rpartition(":")
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            return await _why(host.strip("[]"), int(port), tls)
    except (TimeoutError, OSError):
        return None


async def _why(host: str, port: int, tls: ClientTls | None) -> str | None:
    if tls is None:
        speaks_tls = await _handshake(host, port, _believing_all(), host) is None
        return "it speaks TLS; name the authority of its certificate (tls_ca)" if speaks_tls else None
    error = await _handshake(host, port, _context(tls), tls.server_name or host)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not believed: {error.verify_message}"
    if error is None:
        return None
    text = f"{getattr(error, 'reason', '')} {error}".upper()
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER" in text:
        return "it does not speak TLS"
    if tls.cert is None:
        return "it ends the connection: it asks for a certificate, it seems, and none was shown"
    return "it does not believe the certificate that was shown: another authority's, or expired"


async def _handshake(host: str, port: int, context: ssl.SSLContext, name: str) -> Exception | None:
    """What ends a handshake and the first words of the other side; None if nothing does.

    Raises:
        OSError: nobody listens there.
    """
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError) as error:
        return error
    try:
        # Since TLS 1.3 a server looks at the caller's certificate when the caller thinks all is well.
        return None if await reader.read(1) else ConnectionResetError("the connection was ended")
    except (ssl.SSLError, ConnectionError) as error:
        return error
    finally:
        writer.transport.abort()


def _context(tls: ClientTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca)
    context.set_alpn_protocols(["h2"])
    if tls.cert is not None and tls.key is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _believing_all() -> ssl.SSLContext:
    """To find out whether the other side speaks TLS at all; nothing is said to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
