"""Settings of the three services: one frozen class each, one definition of every default.

Sources, strongest first: command line (`--max-running 64`), environment (`SPECDECODE_TARGET_MAX_RUNNING=64`),
one TOML or YAML file (`--config PATH` or `SPECDECODE_CONFIG`) with sections `target`, `draft` and `router`,
defaults. `none` (or an empty environment variable) stands for an absent value.

    settings = load_settings(TargetSettings, sys.argv[1:])

Constructing a class directly, as tests do, reads nothing but its arguments.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar

import yaml
from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from specdecode import __version__
from specdecode.cache import cache_root
from specdecode.errors import FieldViolation, InvalidArgumentError
from specdecode.requests import LONGEST_PIECE_SECONDS, MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS, PIECE_SECONDS
from specdecode.tls import ClientTls, Exposure, ServerTls, is_private
from specdecode.types import MAX_DRAFT_TOKENS

CONFIG_VARIABLE = "SPECDECODE_CONFIG"
DEFAULT_MODEL = "smollm2-135m-instruct"
ROUTER_PORT = 50051
HTTP_PORT = 8080
TARGET_PORT = 50052
DRAFT_PORT = 50053
COMMANDS = (
    *("generate", "chat", "status", "figures", "doctor", "scale"),
    *("plan", "simulate", "calibrate", "distill", "stats", "audit"),
)
"""Commands with a section of their own in the file, beside the services'."""
CLIENT = "client"
"""The section of what all commands share that ask a router."""
MAX_TOP_K = 64
"""Largest support of q on the wire."""

MIB = 2**20
GIB = 2**30
WATCH_SCHEME = "watch://"
"""Before the address of a registry of replicas."""
DNS_SCHEME = "dns:///"
"""Before a name that resolves to the addresses of all replicas."""
_ADDRESS = re.compile(r"(?:dns:///)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT.*|PORT_[0-9]+_(TCP|UDP|SCTP).*)$")

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
CalibrationMode = Literal["auto", "off", "refresh"]
LogLevel = Literal["debug", "info", "warning", "error"]


def _absent(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _split_any(value: object) -> object:
    return () if _absent(value) is None else _split(value)


def _check_address(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(f"{address!r} is not an address")
    return address


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(names):
        raise ValueError("a name is empty")
    return names


def _check_endpoint(endpoint: str | None) -> str | None:
    if endpoint is not None:
        _check_address(re.sub("^https?://", "", endpoint))
    return endpoint


def _check_source(source: str) -> str:
    _check_address(source.removeprefix(WATCH_SCHEME))
    return source


def _check_label(label: str) -> str:
    name, equals, value = label.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{label!r} is no NAME=VALUE")
    return label


def _check_distinct(addresses: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(addresses)) < len(addresses):
        raise ValueError("one address stands twice")
    return addresses


Bytes = Annotated[ByteSize | None, BeforeValidator(_absent)]
OptionalInt = Annotated[int | None, BeforeValidator(_absent)]
OptionalStr = Annotated[str | None, BeforeValidator(_absent)]
Address = Annotated[str, AfterValidator(_check_address)]
OptionalAddress = Annotated[Address | None, BeforeValidator(_absent)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_names)]
OptionalEndpoint = Annotated[str | None, AfterValidator(_check_endpoint), BeforeValidator(_absent)]
Labels = Annotated[
    tuple[Annotated[str, AfterValidator(_check_label)], ...], NoDecode, BeforeValidator(_split_any)
]
Source = Annotated[str, AfterValidator(_check_source)]
OptionalSource = Annotated[Source | None, BeforeValidator(_absent)]
Sources = Annotated[tuple[Source, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_distinct)]


def _option(default: object, what: str, allowed: str = "", **limits: Any) -> Any:
    """A field with its default; `allowed` says range and unit, both in --help and when a value is refused."""
    description = f"{what}; {allowed}" if allowed else what
    return Field(default, description=description, json_schema_extra={"allowed": allowed}, **limits)


def _count(default: int | None, what: str, unit: str, low: int, high: int) -> Any:
    return _option(default, what, f"{low} to {high} {unit}", ge=low, le=high)


def _real(default: float, what: str, unit: str, low: float, high: float) -> Any:
    return _option(default, what, f"{low:g} to {high:g}{' ' if unit else ''}{unit}", ge=low, le=high)


def _readable(size: int) -> str:
    return ByteSize(size).human_readable().replace(".0", "")


def _size(default: int | None, what: str, low: int, high: int) -> Any:
    allowed = f"{_readable(low)} to {_readable(high)}, written as 512MiB or 2GiB"
    return _option(default, what, allowed, ge=low, le=high)


def _port(default: int) -> Any:
    return _option(default, "TCP port to listen on, 0 for any free one", "0 to 65535", ge=0, le=65535)


class ServiceSettings(BaseSettings):
    """What all three services have."""

    section: ClassVar[str]
    program: ClassVar[str]

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    host: str = _option("127.0.0.1", "address of the interface to listen on", "not empty", min_length=1)
    drain_seconds: float = _real(30.0, "grace for running requests after SIGTERM", "seconds", 0, 3600)
    max_message_bytes: ByteSize = _size(16 * MIB, "largest message sent or received", 64 * 1024, GIB)
    log_level: LogLevel = _option("info", "least severe records that are logged")
    log_format: Literal["text", "json"] = _option("text", "how they are written, one a line")
    max_streams: int = _count(
        Exposure.max_streams, "calls at once on one connection; more wait", "calls", 1, 2**20
    )
    reflection: bool = _option(True, "let anybody list the methods")
    tls_cert: OptionalStr = _option(None, "PEM file of the certificate to listen with; none: no TLS")
    tls_key: OptionalStr = _option(None, "PEM file of its private key")
    tls_client_ca: OptionalStr = _option(
        None, "PEM file of authorities that callers' certificates must be signed by; none asks for none"
    )
    tls_client_names: Names = _option(
        (), "names in certificates of those who may call; without any all that the authority signed may"
    )
    health_port: OptionalInt = _option(
        None,
        "plaintext TCP port of health alone, for probes without a certificate, 0 for any free one",
        "0 to 65535, or none",
        ge=0,
        le=65535,
    )

    otlp_endpoint: OptionalEndpoint = _option(
        None, "collector that gets traces by OTLP over gRPC; none traces nothing", "host:port or URL, or none"
    )
    otlp_metrics_seconds: float = _real(
        0.0, "how often the collector gets metrics as well; 0: never", "seconds", 0, 3600
    )
    metrics_port: OptionalInt = _count(
        None, "TCP port that Prometheus scrapes, 0 for any free one; none has none", "or none", 0, 65535
    )

    mesh_ca: OptionalStr = _option(
        None, "PEM file of the authority of the other services' certificates; none: no TLS to them"
    )
    mesh_cert: OptionalStr = _option(None, "PEM file of the certificate that they are shown")
    mesh_key: OptionalStr = _option(None, "PEM file of its private key")
    mesh_name: OptionalStr = _option(
        None, "name expected in their certificates; none takes the host of each address"
    )

    @property
    def mesh(self) -> ClientTls | None:
        """How other services are called; None: in plaintext."""
        if self.mesh_ca is None:
            return None
        return ClientTls(self.mesh_ca, self.mesh_cert, self.mesh_key, self.mesh_name)

    @property
    def exposure(self) -> Exposure:
        """What the server shows, and to whom."""
        tls = None
        if self.tls_cert is not None and self.tls_key is not None:
            tls = ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca, self.tls_client_names)
        return Exposure(tls, self.reflection, self.health_port, self.max_streams)

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both, or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        if self.tls_client_names and self.tls_client_ca is None:
            raise ValueError("tls_client_names needs tls_client_ca: names are believed when it signed them")
        if (self.mesh_cert is None) != (self.mesh_key is None):
            raise ValueError("mesh_cert and mesh_key belong together: set both, or none")
        if self.mesh_ca is None and (self.mesh_cert is not None or self.mesh_name is not None):
            raise ValueError("mesh_cert, mesh_key and mesh_name need mesh_ca")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only arguments: `load_settings` merges the other sources, so that a refusal can name its source."""
        return (init_settings,)


class ModelServiceSettings(ServiceSettings):
    """What the two services that run a model have."""

    registry: OptionalAddress = _option(
        None, "registry of replicas to announce itself to; none announces nowhere", "one host:port, or none"
    )
    replica_id: OptionalStr = _option(None, "its name in the registry; none makes one of host and process")
    advertised_host: OptionalStr = _option(
        None, "host at which routers reach it, for the registry; none takes the interface's address"
    )
    dtype: DType = _option("auto", "number format of weights and KV; auto takes the checkpoint's own")
    device: Device = _option("auto", "where the model runs; auto takes a GPU if there is one")
    num_threads: int = _count(0, "of one forward on the CPU; 0 leaves torch's default", "threads", 0, 1024)
    kv_memory: Bytes = _size(None, "memory of the KV pool; none takes kv_memory_fraction", MIB, 2**46)
    kv_memory_fraction: float = _real(0.3, "share of the free memory for the KV pool", "", 0.01, 0.95)
    num_blocks: OptionalInt = _count(None, "KV blocks; overrides the memory options", "blocks", 2, 2**31 - 1)
    block_size: int = _count(16, "tokens of one KV block", "tokens", 1, 256)
    max_length: int = _count(0, "longest sequence; 0 takes the model's context", "tokens", 0, 2**24)
    kernels: bool = _option(
        True, "run on a CPU with kernels compiled for it; off is torch alone, their reference"
    )
    prefill_chunk: int = _count(256, "most prompt tokens of one sequence in one forward", "tokens", 1, 2**16)
    calibration: CalibrationMode = _option(
        "auto", "costs that routers decide by; auto measures what is not kept, refresh measures, off has none"
    )
    calibration_seconds: float = _real(20.0, "budget of measuring them at start", "seconds", 0.1, 3600)
    engine_seed: OptionalInt = _option(
        None,
        "seed of the noise of unseeded requests, for tests; none draws a fresh one",
        "0 to 2^63 - 1",
        ge=0,
        lt=2**63,
    )


class TargetSettings(ModelServiceSettings):
    """Settings of the target service."""

    section = "target"
    program = "python -m target_service"

    model: str = _option(
        DEFAULT_MODEL, "model: a fetched name, a directory or a hub id", "not empty", min_length=1
    )
    port: int = _port(TARGET_PORT)
    max_running: int = _count(256, "sequences in the running batch", "sequences", 1, 2**16)
    max_waiting: int = _count(1024, "sequences that may wait for admission", "sequences", 0, 2**20)
    max_tokens_in_flight: int = _count(
        512, "query tokens of one forward, drafts and prefill together", "tokens", MAX_DRAFT_TOKENS + 1, 2**18
    )
    replicas: int = _count(
        0,
        "target replicas placed by Ray, with their registry on host and port; 0 serves itself",
        "replicas",
        0,
        4096,
    )
    draft_replicas: int = _count(0, "draft replicas placed by Ray beside them", "replicas", 0, 4096)
    tensor_parallel: int = _count(
        1, "ranks (processes, each with a GPU of its own) that the model is dealt out to", "ranks", 1, 64
    )
    max_replicas: OptionalInt = _count(
        None, "target replicas up to which more are added under load; none: no more", "replicas", 1, 4096
    )
    scale_up_price: float = _real(
        0.5,
        "price λ, on the replicas' average, from which on another is added",
        "emitted tokens",
        0,
        100,
    )
    scale_up_seconds: float = _real(15.0, "how long the load must be high first", "seconds", 0, 86400)
    scale_down_seconds: float = _real(
        300.0, "how long one must be idle before one is taken away, never below replicas", "seconds", 0, 86400
    )
    ray_address: OptionalStr = _option(
        None, "Ray cluster to join, host:port or auto; none starts one of this machine that ends with it"
    )
    gpus_per_rank: float = _real(
        0, "GPUs reserved for each target replica, of which it sees no others; 0 on a CPU", "GPUs", 0, 16
    )
    gpus_per_draft: float = _real(0, "GPUs reserved for each draft replica, also a fraction", "GPUs", 0, 16)
    cores_per_replica: float = _real(
        1, "processor cores that Ray reserves for each replica", "cores", 0, 4096
    )
    accelerator_type: OptionalStr = _option(
        "auto",
        "kind of GPU for targets as Ray names it; auto takes H100 with device cuda, else any; none: any",
    )
    node_labels: Labels = _option((), "labels of nodes for replicas", "NAME=VALUE, comma between")
    placement_seconds: float = _real(
        120.0, "how long a replica may wait for a place at start", "seconds", 1, 86400
    )
    max_restarts: int = _count(100, "how often Ray starts a replica anew that died", "times", -1, 2**20)
    prefix_cache: bool = _option(True, "reuse KV of equal prefixes")
    trust_draft: bool = _option(True, "believe q as the draft sends it; otherwise drafts count as one-hot")


class DraftSettings(ModelServiceSettings):
    """Settings of the draft service."""

    section = "draft"
    program = "python -m draft_service"

    model: OptionalStr = _option(
        None, "draft model: a fetched name, a directory or a hub id; none offers the n-gram drafter alone"
    )
    port: int = _port(DRAFT_PORT)
    calibration_seconds: float = _real(10.0, "budget of measuring them at start", "seconds", 0.1, 3600)
    max_sequences: int = _count(256, "sequences open at once; more are refused", "sequences", 1, 2**16)
    max_draft_tokens: int = _count(
        MAX_DRAFT_TOKENS, "most tokens of one draft, whatever is asked for", "tokens", 1, MAX_DRAFT_TOKENS
    )
    top_k: int = _count(MAX_TOP_K, "support of q, what the draft model samples from", "tokens", 1, MAX_TOP_K)
    niceness: int = _count(
        10, "how far a draft model on a CPU stands back for others, above all the target", "levels", 0, 19
    )
    ngram_min: int = _count(2, "shortest match of the n-gram drafter", "tokens", 1, 64)
    ngram_max: int = _count(5, "longest match of the n-gram drafter, tried first", "tokens", 1, 64)
    ngram_match: Literal["earliest", "latest"] = _option("latest", "which of equal matches is continued")
    ngram_trust: float = _real(
        1.5, "tokens the n-gram drafter proposes for each one that agrees before the match", "", 0.1, 1000
    )

    suffix_tokens: int = _count(
        0, "outputs that the suffix drafter remembers to draft from; 0 offers none", "tokens", 0, 2**26
    )

    @model_validator(mode="after")
    def _check_ngram_range(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min {self.ngram_min} is above ngram_max {self.ngram_max}")
        return self


class RouterSettings(ServiceSettings):
    """Settings of the router."""

    section = "router"
    program = "python -m router"

    model: str = _option(
        DEFAULT_MODEL, "tokenizer: a fetched name, a directory or a hub id", "not empty", min_length=1
    )
    port: int = _port(ROUTER_PORT)
    http_port: OptionalInt = _option(
        HTTP_PORT,
        "TCP port of the HTTP front, 0 for any free one; none switches it off",
        "0 to 65535, or none",
        ge=0,
        le=65535,
    )
    targets: Sources = _option(
        (f"127.0.0.1:{TARGET_PORT}",),
        "target replicas; also dns:///name:port, all of a name, and watch://host:port, a registry's",
        "distinct host:port, comma between",
        min_length=1,
    )
    draft: OptionalSource = _option(
        f"127.0.0.1:{DRAFT_PORT}",
        "draft service; also watch://host:port, one of a registry's; none never speculates",
        "one host:port, or none",
    )
    trust_draft: Literal["auto", "on", "off"] = _option(
        "auto",
        "believe q as the draft sends it; auto: of a draft with a mesh certificate or a private address",
    )
    drafter: Literal["auto", "ngram", "suffix", "model"] = _option(
        "auto", "drafter of requests that name none; with auto all that are offered compete"
    )
    num_draft_tokens: int = _count(
        8, "cap on γ of requests that name none; the router decides below it", "tokens", 0, MAX_DRAFT_TOKENS
    )
    max_draft_tokens: int = _count(
        MAX_DRAFT_TOKENS, "cap on γ of all requests; 0 never speculates", "tokens", 0, MAX_DRAFT_TOKENS
    )
    max_tokens_in_flight: OptionalInt = _count(
        None, "tokens of one step beyond which nothing is drafted; none: no cap", "tokens", 1, 2**18
    )
    max_temperature: float = _real(2.0, "highest temperature of requests that are drafted for", "", 0, 2)
    min_acceptance: float = _real(
        0.4, "share of tested drafts accepted below which a drafter that is not cheap rests", "", 0, 1
    )
    estimates_path: OptionalStr = _option(
        "auto", "file that keeps what was learnt of acceptance; auto takes the cache, none keeps nothing"
    )
    draft_deadline_seconds: float = _real(
        1.0, "how long a round waits for drafts before it goes on without", "seconds", 0.001, 60
    )
    lease_tokens: int = _count(16, "tokens a target may emit without asking", "tokens", 1, 1024)
    piece_seconds: float = _real(
        PIECE_SECONDS,
        f"how long a client's text gathers, for each open request; {LONGEST_PIECE_SECONDS} seconds at most",
        *("seconds", 0, 1),
    )
    max_requests: int = _count(1024, "requests at once; more are refused", "requests", 1, 2**20)
    max_running: int = _count(
        256, "choices on one target at once; more wait here, in fair turns", "choices", 1, 2**16
    )
    max_waiting_tokens: int = _count(
        2**22, "prompt tokens of requests that wait; more are refused", "tokens", 1, 2**40
    )
    max_prompt_tokens: OptionalInt = _count(
        None, "longest prompt; none: what the context holds", "tokens", 1, 2**24
    )
    max_output_tokens: OptionalInt = _count(
        None, "longest output; none: what the context holds", "tokens", 1, 2**24
    )
    max_choices: int = _count(MAX_CHOICES, "choices of one request", "choices", 1, MAX_CHOICES)
    max_stops: int = _count(MAX_STOPS, "stop strings of one request", "strings", 0, MAX_STOPS)
    max_logprobs: int = _count(MAX_LOGPROBS, "logprobs beside each token", "logprobs", 0, MAX_LOGPROBS)
    keys_path: OptionalStr = _option(None, "file of API keys (specdecode keys); none asks for none")
    partition_caches: bool = _option(
        True, "with keys: prefix cache and suffix memory of each tenant are its own"
    )
    park_seconds: float = _real(
        2.0, "how long a text that its client does not read keeps its KV", "seconds", 0.01, 3600
    )
    stuck_seconds: float = _real(
        60.0, "how long a client may read nothing before its request is ended", "seconds", 0.1, 86400
    )
    max_prompt_bytes: ByteSize = _size(4 * MIB, "largest prompt", 1024, GIB)
    failover_seconds: float = _real(30.0, "how long a request waits for a target replica", "seconds", 0, 3600)
    record_path: OptionalStr = _option(
        None, "file that gets a JSON line for each request, without texts; none writes none"
    )
    record_bytes: ByteSize = _size(64 * MIB, "size at which that file becomes an older one", 1024, 2**40)
    record_files: int = _count(5, "that are kept of it, the newest included", "files", 2, 1000)
    record_tokens: bool = _option(
        False, "write the ids of prompts and outputs as well, which `specdecode audit` needs"
    )
    trace_detail: Literal["rounds", "events", "request"] = _option(
        "rounds",
        "what a trace tells of requests that do not say: rounds as spans, as events, or neither",
    )
    trace_ratio: float = _real(1.0, "share of the requests outside a trace that are traced", "", 0, 1)
    trace_slow_seconds: float = _real(
        30.0, "requests that take longer are traced in any case, as those that fail", "seconds", 0, 86400
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.tls_client_names and self.http_port is not None:
            raise ValueError("tls_client_names holds for gRPC alone: set http_port to none")
        return self

    @property
    def believes_draft(self) -> bool:
        """Whether the draft service is the operator's own, or said to be."""
        if self.trust_draft != "auto" or self.draft is None:
            return self.trust_draft != "off"
        return self.mesh_ca is not None or is_private(self.draft.removeprefix(WATCH_SCHEME))

    @property
    def keys_file(self) -> Path | None:
        """Of the API keys; None: none are used."""
        return None if self.keys_path is None else Path(self.keys_path)

    @property
    def estimates_file(self) -> Path | None:
        """Where estimates are kept; None: nowhere."""
        if self.estimates_path == "auto":
            return cache_root() / "estimates.json"
        return None if self.estimates_path is None else Path(self.estimates_path)


S = TypeVar("S", bound=ServiceSettings)


def load_settings(cls: type[S], argv: Sequence[str]) -> S:
    """The settings of one service, or exit code 2 with one line a problem on stderr.

    Args:
        cls: which service.
        argv: the command line without the program's name; `--help` prints all options and exits with 0.
    """
    try:
        return read_settings(cls, argv)
    except InvalidArgumentError as error:
        for violation in error.violations:
            print(f"{cls.program}: {violation.field}: {violation.description}", file=sys.stderr)
        raise SystemExit(2) from None


def read_settings(cls: type[S], argv: Sequence[str]) -> S:
    """As `load_settings`, raising InvalidArgumentError with one violation a problem."""
    path, options = _read_command_line(cls, argv)
    sources = (options, _read_environment(cls), _read_file(cls, path))
    merged = {name: value for source in reversed(sources) for name, value in source.values.items()}
    try:
        return cls(**merged)
    except ValidationError as error:
        violations = [_violation(cls, details, sources) for details in error.errors()]
        raise _refusal(list(dict.fromkeys(violations))) from None


class _Source:
    """Values of one source and how it calls a field."""

    def __init__(self, values: dict[str, Any], prefix: str, *, case: str = "") -> None:
        self.values = values
        self._prefix = prefix
        self._case = case

    def name_of(self, field: str) -> str:
        match self._case:
            case "kebab":
                return self._prefix + field.replace("_", "-")
            case "upper":
                return self._prefix + field.upper()
            case _:
                return self._prefix + field


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError.of("command line", f"{message}; --help lists the options")


def _read_command_line(cls: type[ServiceSettings], argv: Sequence[str]) -> tuple[str | None, _Source]:
    parser = _Parser(
        prog=cls.program,
        description=(
            f"{cls.__doc__} Every option can also be set by environment ({_env_prefix(cls)}NAME, dashes as "
            f"underscores) or in section [{cls.section}] of the file; the command line wins over both, the "
            "environment over the file."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="PATH", help=f"TOML or YAML file; also {CONFIG_VARIABLE} (default: none)"
    )
    parser.add_argument("--version", action="version", version=__version__)
    found: dict[str, str | None] = {}

    def parse(root: argparse.ArgumentParser, args: Sequence[str] | None = None) -> argparse.Namespace:
        namespace = argparse.ArgumentParser.parse_args(root, args)
        found["config"] = vars(namespace).pop("config")
        return namespace

    source: CliSettingsSource[Any] = CliSettingsSource(
        cls,
        root_parser=parser,
        parse_args_method=parse,
        add_argument_method=_add_argument,
        cli_parse_args=list(argv),
        cli_parse_none_str="none",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )
    return found["config"] or os.environ.get(CONFIG_VARIABLE) or None, _Source(source(), "--", case="kebab")


def _add_argument(parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
    """As argparse does it, with sizes and lists shown the way they are typed."""
    match options.get("metavar"):
        case "ByteSize":
            options["metavar"] = "size"
            options["help"] = re.sub(r"(?<=default: )\d+", lambda m: _readable(int(m[0])), options["help"])
        case "tuple[str,...]":
            options["metavar"] = "addresses"
            options["help"] = re.sub(r"\('(.*)',\)", r"\1", options["help"])
    return parser.add_argument(*names, **options)


def _env_prefix(cls: type[ServiceSettings]) -> str:
    return f"SPECDECODE_{cls.section.upper()}_"


def _read_environment(cls: type[ServiceSettings]) -> _Source:
    prefix = _env_prefix(cls)
    source = _Source(EnvSettingsSource(cls, env_prefix=prefix, env_ignore_empty=True)(), prefix, case="upper")
    known = {source.name_of(field) for field in cls.model_fields}
    unknown = [
        FieldViolation(name, f"unknown variable; known are {prefix}NAME for the options that --help lists")
        for name in os.environ
        if name.startswith(prefix) and name not in known and not _is_service_link(name)
    ]
    if unknown:
        raise _refusal(unknown)
    links = [name for name, value in source.values.items() if str(value).startswith(("tcp://", "udp://"))]
    for name in links:
        del source.values[name]
    return source


def _is_service_link(name: str) -> bool:
    """Whether Kubernetes set it: for a service called specdecode-target, containers of its namespace get
    SPECDECODE_TARGET_SERVICE_HOST and SPECDECODE_TARGET_PORT=tcp://10.0.0.1:50052.
    """
    return _SERVICE_LINK.search(name) is not None


def _read_file(cls: type[ServiceSettings], path: str | None) -> _Source:
    if path is None:
        return _Source({}, "")
    return _Source(read_section(path, cls.section), f"{path} [{cls.section}] ")


def read_section(path: str, section: str) -> dict[str, Any]:
    """Options that a TOML or YAML file has for a service or a command; empty where it has no such section.

    Raises:
        InvalidArgumentError: no such file, another format, or a section that nobody reads.
    """
    sections = _parse_file(Path(path))
    known = ("target", "draft", "router", CLIENT, *COMMANDS)
    if unknown := [name for name in sections if name not in known]:
        description = f"unknown section; known are {', '.join(known)}"
        raise _refusal([FieldViolation(f"{path} [{name}]", description) for name in unknown])
    values = sections.get(section) or {}
    if not isinstance(values, dict):
        raise InvalidArgumentError.of(f"{path} [{section}]", "a section with options is needed")
    return {str(name): value for name, value in values.items()}


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        match path.suffix.lower():
            case ".toml":
                content: Any = tomllib.loads(text)
            case ".yaml" | ".yml":
                content = yaml.safe_load(text) or {}
            case _:
                raise InvalidArgumentError.of("--config", f"{path} is neither .toml nor .yaml nor .yml")
    except OSError as error:
        raise InvalidArgumentError.of("--config", f"{path} can't be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise InvalidArgumentError.of("--config", f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise InvalidArgumentError.of("--config", f"{path} holds no sections")
    return content


def _violation(
    cls: type[ServiceSettings], details: ErrorDetails, sources: Sequence[_Source]
) -> FieldViolation:
    name = str(details["loc"][0]) if details["loc"] else ""
    source = next((source for source in sources if name in source.values), sources[0])
    reason = details["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if not name:
        return FieldViolation("options", reason)
    if details["type"] == "extra_forbidden":
        return FieldViolation(source.name_of(name), "unknown option; --help lists the options")
    allowed = _allowed(cls.model_fields[name]) or reason
    return FieldViolation(source.name_of(name), f"{source.values.get(name)!r} is refused; allowed: {allowed}")


def _allowed(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) else ""


def _refusal(violations: Sequence[FieldViolation]) -> InvalidArgumentError:
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
    return InvalidArgumentError(message, violations=tuple(violations))
