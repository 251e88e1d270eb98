"""The compose file: all that it names is there, and services take their file and their commands."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from specdecode.config import DraftSettings, RouterSettings, ServiceSettings, TargetSettings, read_settings
from specdecode.models import KNOWN_MODELS
from tests.deploy.chart import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
FILE = DEPLOY / "compose" / "specdecode.yaml"
OURS: dict[str, tuple[str, type[ServiceSettings]]] = {
    "target": ("target_service", TargetSettings),
    "draft": ("draft_service", DraftSettings),
    "router": ("router", RouterSettings),
}


def test_images_are_pinned() -> None:
    for name, service in COMPOSE["services"].items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-cpu)?", service["image"]), name


def test_all_files_that_are_mounted_are_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in COMPOSE["volumes"]


def test_only_this_machine_reaches_the_ports() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", OURS)
def test_services_are_unprivileged_and_end_in_order(name: str) -> None:
    service, (module, cls) = COMPOSE["services"][name], OURS[name]
    assert service["entrypoint"][:3] == ["python", "-m", module]
    assert (service["read_only"], service["cap_drop"], service["user"]) == (True, ["ALL"], "10001:10001")
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > cls.model_fields["drain_seconds"].default
    assert "mem_limit" in service


@pytest.mark.parametrize("name", OURS)
def test_services_take_their_file(name: str) -> None:
    _, cls = OURS[name]
    settings = read_settings(cls, ["--config", str(FILE)])
    probed = COMPOSE["services"][name]["environment"]["SPECDECODE_PROBE"]
    assert probed == f"127.0.0.1:{settings.port}"  # type: ignore[attr-defined]
    if isinstance(settings, RouterSettings):
        hosts = [address.split(":")[0] for address in (*settings.targets, settings.draft or "")]
        assert set(hosts) <= set(COMPOSE["services"])
        published = {port.split(":")[-1] for port in COMPOSE["services"][name]["ports"]}
        assert published == {str(settings.port), str(settings.http_port)}


def test_the_models_that_are_fetched_are_known_and_served() -> None:
    fetched = COMPOSE["services"]["fetch"]["command"]
    assert set(fetched) <= set(KNOWN_MODELS)
    sections = yaml.safe_load(FILE.read_text())
    assert {section["model"] for section in sections.values()} == set(fetched)


def test_collector_traces_and_prometheus_are_wired() -> None:
    collector = yaml.safe_load((DEPLOY / "compose" / "collector.yaml").read_text())
    assert collector["exporters"]["otlp"]["endpoint"].split(":")[0] in COMPOSE["services"]
    pipeline = collector["service"]["pipelines"]["traces"]
    assert all(
        name in collector[part]
        for part in ("receivers", "exporters", "processors")
        for name in pipeline[part]
    )
    sections = yaml.safe_load(FILE.read_text())
    for section in sections.values():
        host, port = section["otlp_endpoint"].split(":")
        assert host in COMPOSE["services"]
        assert collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(f":{port}")
    prometheus = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text())
    scraped = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    assert set(scraped) == {f"{name}:{section['metrics_port']}" for name, section in sections.items()}
