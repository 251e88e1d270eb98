"""What the chart mounts is what the services read: with their own loader, and as processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode.config import DraftSettings, RouterSettings, ServiceSettings, TargetSettings, read_settings
from tests.deploy.cases import CASES
from tests.deploy.chart import ROLES, Case, Pod, serving_pods

pytestmark = pytest.mark.usefixtures("real_helm")

SETTINGS: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}


def file_of(case: Case, pod: Pod, directory: Path) -> Path:
    """The services' file as the pod sees it."""
    (volume,) = [v for v in pod.spec["volumes"] if v["name"] == "config"]
    ((name, text),) = case.named("ConfigMap", volume["configMap"]["name"])["data"].items()
    path = directory / f"{volume['configMap']['name']}-{name}"
    path.write_text(text, encoding="utf-8")
    return path


def sections(path: Path) -> dict[str, Any]:
    """Options by section."""
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def read(case: Case, pod: Pod, directory: Path) -> ServiceSettings:
    """The settings of the pod's service, by the service's own loader."""
    path = file_of(case, pod, directory)
    (section,) = sections(path)
    return read_settings(SETTINGS[section], ["--config", str(path)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_services_take_their_files_and_listen_where_pods_say(case: Case, tmp_path: Path) -> None:
    for pod in serving_pods(case.objects):
        settings = read(case, pod, tmp_path)
        ports = {port["name"]: port["containerPort"] for c in pod.containers for port in c["ports"]}
        assert settings.host == "0.0.0.0"
        if "grpc" in ports:
            assert ports["grpc"] == settings.port  # type: ignore[attr-defined]
        if isinstance(settings, RouterSettings):
            assert ports.get("http") == settings.http_port
        assert ports.get("metrics") == getattr(settings, "metrics_port", None) or pod.role == "ray"
        assert ports.get("health") == getattr(settings, "health_port", None) or pod.role == "ray"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_routers_look_for_services_that_are_there(case: Case, tmp_path: Path) -> None:
    services = {made["metadata"]["name"]: made for made in case.of_kind("Service")}
    for pod in serving_pods(case.objects):
        settings = read(case, pod, tmp_path)
        if not isinstance(settings, RouterSettings):
            continue
        addresses = [*settings.targets, *([settings.draft] if settings.draft else [])]
        for address in addresses:
            host, port = address.removeprefix("dns:///").removeprefix("watch://").split(":")
            name = host.split(".")[-1]
            assert int(port) in [p["port"] for p in services[name]["spec"]["ports"]], address
            assert services[name]["spec"]["clusterIP"] == "None"
        model = pod.labels["specdecode.io/model"]
        for owner in case.of_kind("StatefulSet"):
            if owner["metadata"]["labels"]["specdecode.io/model"] == model and "." in settings.targets[0]:
                assert len(settings.targets) in (1, owner["spec"].get("replicas"))
                assert owner["spec"]["serviceName"] in services


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_command_line_is_an_entry_point(case: Case) -> None:
    commands = [
        c["command"] for pod in serving_pods(case.objects) for c in pod.all_containers if "command" in c
    ]
    modules = {tuple(command[:3]) for command in commands}
    known = {("python", "-m", m) for m in ("router", "target_service", "draft_service", "specdecode.cli")}
    assert modules <= known


def settings_of(name: str, values: dict[str, Any], tmp_path: Path) -> Sequence[ServiceSettings]:
    case = Case(name, values=values)
    return [read(case, pod, tmp_path) for pod in serving_pods(case.objects)]


def test_options_of_the_services_reach_them(tmp_path: Path) -> None:
    values = {
        "router": {"settings": {"num_draft_tokens": 3, "max_prompt_bytes": "1MiB"}},
        "target": {"settings": {"kv_memory": "none", "prefix_cache": False}},
        "draft": {"settings": {"suffix_tokens": 1000000, "ngram_match": "earliest"}},
    }
    by_role = {settings.section: settings for settings in settings_of("options", values, tmp_path)}
    assert set(by_role) == set(ROLES)
    router, target, draft = (by_role[role] for role in ROLES)
    assert isinstance(router, RouterSettings)
    assert isinstance(target, TargetSettings)
    assert isinstance(draft, DraftSettings)
    assert (router.num_draft_tokens, router.max_prompt_bytes) == (3, 2**20)
    assert (target.kv_memory, target.prefix_cache, target.model) == (None, False, "smollm2-135m-instruct")
    assert (draft.suffix_tokens, draft.ngram_match) == (1_000_000, "earliest")
    assert draft.model == "smollm2-135m-instruct-draft"
