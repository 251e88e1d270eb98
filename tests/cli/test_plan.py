"""How `up` puts three command lines together."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import typer

from specdecode.cli.plan import StackFlags, plan
from specdecode.cli.stack import Service
from specdecode.config import DraftSettings, RouterSettings, ServiceSettings, TargetSettings, read_settings

PORTS = {"router_port": "0", "target_port": "0", "draft_port": "0", "http_port": "0"}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for section in ("TARGET", "DRAFT", "ROUTER"):
        for name in ("MODEL", "PORT", "HOST"):
            monkeypatch.delenv(f"SPECDECODE_{section}_{name}", raising=False)
    monkeypatch.delenv("SPECDECODE_CONFIG", raising=False)


def settings_of(service: Service) -> ServiceSettings:
    """What the service will read."""
    classes = {"target": TargetSettings, "draft": DraftSettings, "router": RouterSettings}
    return read_settings(classes[service.name], service.argv)


def planned(**flags: str) -> tuple[TargetSettings, DraftSettings, RouterSettings]:
    target, draft, router = map(settings_of, plan(StackFlags(**{**PORTS, **flags})))
    assert isinstance(target, TargetSettings)
    assert isinstance(draft, DraftSettings)
    assert isinstance(router, RouterSettings)
    return target, draft, router


def test_the_router_is_told_where_the_others_are() -> None:
    services = plan(StackFlags(**PORTS))
    target, draft, router = map(settings_of, services)
    assert [service.name for service in services] == ["target", "draft", "router"]
    assert isinstance(router, RouterSettings)
    assert router.targets == (services[0].address,)
    assert router.draft == services[1].address
    ports = [int(service.address.rsplit(":", 1)[1]) for service in services]
    assert len(set(ports)) == 3
    assert ports == [getattr(settings, "port") for settings in (target, draft, router)]  # noqa: B009


def test_the_http_front_has_a_port_of_its_own_or_none() -> None:
    services = plan(StackFlags(**PORTS))
    router = settings_of(services[2])
    assert isinstance(router, RouterSettings)
    assert services[2].url == f"http://127.0.0.1:{router.http_port}"
    assert router.http_port not in (None, 0, *(settings_of(service).port for service in services))  # type: ignore[attr-defined]
    without = plan(StackFlags(**{**PORTS, "http_port": "none"}))[2]
    off = settings_of(without)
    assert isinstance(off, RouterSettings)
    assert (off.http_port, without.url) == (None, "")


def test_an_http_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(typer.BadParameter, match=f"--http-port: {port} is in use"):
            plan(StackFlags(**{**PORTS, "http_port": str(port)}))


def test_the_tokenizer_is_the_targets_unless_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, router = planned(model="mine", draft_model="small")
    assert (target.model, draft.model, router.model) == ("mine", "small", "mine")
    monkeypatch.setenv("SPECDECODE_TARGET_MODEL", "from-environment")
    target, draft, router = planned()
    assert (target.model, draft.model, router.model) == ("from-environment", None, "from-environment")
    monkeypatch.setenv("SPECDECODE_ROUTER_MODEL", "tokenizer")
    assert planned()[2].model == "tokenizer"


def test_options_win_over_environment_and_environment_over_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "specdecode.yaml"
    config.write_text("target: {dtype: float16, max_running: 7}\nrouter: {num_draft_tokens: 9}\n")
    monkeypatch.setenv("SPECDECODE_TARGET_DTYPE", "bfloat16")
    target, draft, router = planned(config=str(config))
    assert (target.dtype, target.max_running, router.num_draft_tokens) == ("bfloat16", 7, 9)
    target, draft, router = planned(config=str(config), dtype="float32", num_draft_tokens="2")
    assert (target.dtype, draft.dtype, router.num_draft_tokens) == ("float32", "float32", 2)


def test_services_on_all_interfaces_are_reached_by_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDECODE_TARGET_HOST", "0.0.0.0")
    (address,) = planned()[2].targets
    assert address.startswith("127.0.0.1:")
