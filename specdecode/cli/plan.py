"""How the three services of one machine are started: options of `up` to command lines that fit together.

Options not given here reach the services as they always do, by environment and file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import typer

from specdecode.cli.file import ConfigFlag
from specdecode.cli.flags import note
from specdecode.cli.stack import Service, free_port, is_free
from specdecode.config import (
    WATCH_SCHEME,
    DraftSettings,
    RouterSettings,
    ServiceSettings,
    TargetSettings,
    read_settings,
)
from specdecode.errors import FieldViolation, InvalidArgumentError

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}

S = TypeVar("S", TargetSettings, DraftSettings, RouterSettings)


@dataclass(frozen=True)
class _Setting:
    """A setting of some services that `up` has an option for."""

    field: str
    services: tuple[type[ServiceSettings], ...]


_BOTH_MODELS = (TargetSettings, DraftSettings)
_SETTINGS = {
    "model": _Setting("model", (TargetSettings,)),
    "draft_model": _Setting("model", (DraftSettings,)),
    "dtype": _Setting("dtype", _BOTH_MODELS),
    "device": _Setting("device", _BOTH_MODELS),
    "threads": _Setting("num_threads", _BOTH_MODELS),
    "kv_memory": _Setting("kv_memory", _BOTH_MODELS),
    "replicas": _Setting("replicas", (TargetSettings,)),
    "ray_address": _Setting("ray_address", (TargetSettings,)),
    "router_port": _Setting("port", (RouterSettings,)),
    "http_port": _Setting("http_port", (RouterSettings,)),
    "target_port": _Setting("port", (TargetSettings,)),
    "draft_port": _Setting("port", (DraftSettings,)),
    "num_draft_tokens": _Setting("num_draft_tokens", (RouterSettings,)),
    "drafter": _Setting("drafter", (RouterSettings,)),
    "draft_deadline_seconds": _Setting("draft_deadline_seconds", (RouterSettings,)),
    "log_level": _Setting("log_level", (TargetSettings, DraftSettings, RouterSettings)),
    "otlp_endpoint": _Setting("otlp_endpoint", (TargetSettings, DraftSettings, RouterSettings)),
}


def _setting(name: str, metavar: str) -> Any:
    """An option with the description and the default that the settings have; they check it, too."""
    setting = _SETTINGS[name]
    field = setting.services[0].model_fields[setting.field]
    default = "none" if field.default is None else str(field.default)
    variables = [f"SPECDECODE_{s.section.upper()}_{setting.field.upper()}" for s in setting.services]
    sections = " and ".join(s.section for s in setting.services)
    text = f"{sections}: {field.description} {note(default, variables)}"
    # Without `envvar`: the settings read the variables themselves.
    return typer.Option(help=text, metavar=metavar, show_default=False, show_envvar=False, envvar=[])


@dataclass(frozen=True)
class StackFlags:
    """Settings of the three services, as texts that the settings read."""

    model: Annotated[str | None, _setting("model", "MODEL")] = None
    draft_model: Annotated[str | None, _setting("draft_model", "MODEL")] = None
    dtype: Annotated[str | None, _setting("dtype", "DTYPE")] = None
    device: Annotated[str | None, _setting("device", "DEVICE")] = None
    threads: Annotated[str | None, _setting("threads", "INTEGER")] = None
    kv_memory: Annotated[str | None, _setting("kv_memory", "SIZE")] = None
    replicas: Annotated[str | None, _setting("replicas", "INTEGER")] = None
    ray_address: Annotated[str | None, _setting("ray_address", "ADDRESS")] = None
    router_port: Annotated[str | None, _setting("router_port", "PORT")] = None
    http_port: Annotated[str | None, _setting("http_port", "PORT")] = None
    target_port: Annotated[str | None, _setting("target_port", "PORT")] = None
    draft_port: Annotated[str | None, _setting("draft_port", "PORT")] = None
    num_draft_tokens: Annotated[str | None, _setting("num_draft_tokens", "INTEGER")] = None
    drafter: Annotated[str | None, _setting("drafter", "DRAFTER")] = None
    draft_deadline_seconds: Annotated[str | None, _setting("draft_deadline_seconds", "NUMBER")] = None
    log_level: Annotated[str | None, _setting("log_level", "LEVEL")] = None
    otlp_endpoint: Annotated[str | None, _setting("otlp_endpoint", "ADDRESS")] = None
    config: ConfigFlag = None


def plan(flags: StackFlags) -> list[Service]:
    """Target, draft and router, in the order of starting; free ports are chosen here.

    Raises:
        typer.BadParameter: names every option, variable or entry of the file that is wrong.
    """
    reader = _Reader(flags)
    target, draft, router = (
        reader.read(TargetSettings),
        reader.read(DraftSettings),
        reader.read(RouterSettings),
    )
    for settings in (target, draft, router):
        if settings is not None and settings.exposure.tls is not None and not settings.health_port:
            needed = "a fixed port is needed with tls_cert: health is asked in plaintext"
            reader.violations.append(FieldViolation(f"{settings.section} health_port", needed))
    if reader.violations or target is None or draft is None or router is None:
        raise _bad_parameter(reader.violations)
    ports = _Ports()
    addresses = [ports.address(target), ports.address(draft), ports.address(router)]
    http = None if router.http_port is None else ports.at("--http-port", router.host, router.http_port)
    if ports.violations:
        raise _bad_parameter(ports.violations)
    scheme = WATCH_SCHEME if target.replicas else ""
    joint = {"targets": scheme + addresses[0], "draft": addresses[1]}
    if http is not None:
        joint["http_port"] = _port_of(http)
    if "model" not in router.model_fields_set:
        joint["model"] = target.model
    scheme = "http" if router.exposure.tls is None else "https"
    return [
        _service(target, flags, addresses[0], {}),
        _service(draft, flags, addresses[1], {}),
        replace(_service(router, flags, addresses[2], joint), url=f"{scheme}://{http}" if http else ""),
    ]


def _bad_parameter(violations: Sequence[FieldViolation]) -> typer.BadParameter:
    lines = dict.fromkeys(f"{violation.field}: {violation.description}" for violation in violations)
    return typer.BadParameter("\n".join(lines))


def _port_of(address: str) -> str:
    return address.rsplit(":", 1)[1]


def _service(settings: ServiceSettings, flags: StackFlags, address: str, joint: dict[str, str]) -> Service:
    overrides = {**joint, "port": _port_of(address)}
    argv = _argv(type(settings), flags, overrides)
    module = settings.program.split()[-1]
    host, _ = address.rsplit(":", 1)
    health = address if settings.exposure.tls is None else f"{host}:{settings.health_port}"
    optional = isinstance(settings, DraftSettings)
    return Service(settings.section, module, argv, address, health, settings.drain_seconds, optional)


def _argv(cls: type[ServiceSettings], flags: StackFlags, overrides: dict[str, str]) -> tuple[str, ...]:
    given = {
        setting.field: getattr(flags, name)
        for name, setting in _SETTINGS.items()
        if cls in setting.services and getattr(flags, name) is not None
    }
    given |= overrides
    options = tuple(f"--{field.replace('_', '-')}={value}" for field, value in given.items())
    return options if flags.config is None else (f"--config={flags.config}", *options)


class _Reader:
    """Reads settings as the services will, and collects what is wrong under the names that `up` has."""

    def __init__(self, flags: StackFlags) -> None:
        self._flags = flags
        self.violations: list[FieldViolation] = []

    def read(self, cls: type[S]) -> S | None:
        """The settings; None if something is wrong."""
        names = {
            f"--{setting.field.replace('_', '-')}": f"--{name.replace('_', '-')}"
            for name, setting in _SETTINGS.items()
            if cls in setting.services
        }
        try:
            return read_settings(cls, _argv(cls, self._flags, {}))
        except InvalidArgumentError as error:
            for violation in error.violations:
                name = names.get(violation.field, violation.field)
                self.violations.append(FieldViolation(name, violation.description))
            return None


class _Ports:
    """Ports of services that can be listened on."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self.violations: list[FieldViolation] = []

    def address(self, settings: TargetSettings | DraftSettings | RouterSettings) -> str:
        """Where the service is reached from this machine."""
        return self.at(f"--{settings.section}-port", settings.host, settings.port)

    def at(self, option: str, host: str, port: int) -> str:
        """Where whoever listens on `port` of `host` is reached from this machine."""
        port = port or free_port(host, self._taken)
        if port in self._taken or not is_free(host, port):
            self.violations.append(FieldViolation(option, f"{port} is in use; 0 takes a free port"))
        self._taken.add(port)
        host = _ANYWHERE.get(host, host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
