"""What holds of all that the chart renders, whatever the values."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.cases import CASES
from tests.deploy.chart import CHART, ROOT, Case, Object, Pod, helm, matches, merge, pods, serving_pods

pytestmark = pytest.mark.usefixtures("real_helm")

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def by_name(items: list[Object]) -> dict[str, Object]:
    return {item["name"]: item for item in items}


@pytest.mark.parametrize("case", [case for case in CASES if not case.values], ids=lambda case: case.name)
def test_lint_finds_nothing_in_the_files_of_values(case: Case) -> None:
    named = [part for file in case.files for part in ("--values", str(CHART / file))]
    done = helm("lint", "--strict", str(CHART), *named)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@every_case
def test_no_two_objects_are_one(case: Case) -> None:
    names = [(o["apiVersion"], o["kind"], o["metadata"]["name"]) for o in case.objects]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for *_, name in names)


@every_case
def test_every_container_is_unprivileged_and_limited(case: Case) -> None:
    for pod in pods(case.objects):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False, str(pod)
        assert pod.spec["enableServiceLinks"] is False, str(pod)
        for container in pod.all_containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, container["name"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"], f"{pod} {container['name']}"
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])


@every_case
def test_every_serving_container_has_probes_on_its_own_ports(case: Case) -> None:
    for pod in serving_pods(case.objects):
        for container in pod.containers:
            ports = {port["containerPort"] for port in container["ports"]}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container[kind].get("grpc") or container[kind]["tcpSocket"]
                assert probe["port"] in ports, f"{pod} {container['name']} {kind}"


@every_case
def test_liveness_does_not_hang_on_what_others_do(case: Case) -> None:
    for pod in serving_pods(case.objects):
        for container in pod.containers:
            if "grpc" in container["livenessProbe"]:
                assert container["livenessProbe"]["grpc"]["service"] == "liveness"
                assert "service" not in container["readinessProbe"]["grpc"]


@every_case
def test_grace_outlasts_announcement_and_longest_request(case: Case) -> None:
    for pod in serving_pods(case.objects):
        sleeps = [c["lifecycle"]["preStop"]["sleep"]["seconds"] for c in pod.containers]
        drains = [section["drain_seconds"] for section in mounted(case, pod).values()]
        assert drains
        assert pod.spec["terminationGracePeriodSeconds"] > max(sleeps) + max(drains)


@every_case
def test_every_selector_finds_pods_and_no_others(case: Case) -> None:
    found = list(pods(case.objects))
    for owner in case.of_kind("Deployment", "StatefulSet"):
        (own,) = [pod for pod in found if pod.owner is owner]
        assert matches(owner["spec"]["selector"], own.labels)
        others = [pod for pod in found if pod.owner is not owner]
        assert not any(matches(owner["spec"]["selector"], pod.labels) for pod in others)
    for selecting in case.of_kind("PodDisruptionBudget", "NetworkPolicy"):
        key = "selector" if selecting["kind"] == "PodDisruptionBudget" else "podSelector"
        assert any(matches(selecting["spec"][key], pod.labels) for pod in found)
    for service in case.of_kind("Service"):
        wanted = {k: v for k, v in service["spec"]["selector"].items() if k != "ray.io/node-type"}
        chosen = [pod for pod in found if matches({"matchLabels": wanted}, pod.labels)]
        assert chosen, service["metadata"]["name"]
        names = {port.get("name") for pod in chosen for c in pod.containers for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for pod in found:
        for constraint in pod.spec.get("topologySpreadConstraints", ()):
            assert matches(constraint["labelSelector"], pod.labels)


@every_case
def test_no_port_is_without_a_policy(case: Case) -> None:
    policies = case.of_kind("NetworkPolicy")
    if case.name == "no-policies":
        assert not policies
        return
    for pod in serving_pods(case.objects):
        own = [p["spec"] for p in policies if matches(p["spec"]["podSelector"], pod.labels)]
        assert len(own) == 1, str(pod)
        assert own[0]["policyTypes"] == ["Ingress", "Egress"]
        admitted = {port["port"] for rule in own[0]["ingress"] for port in rule.get("ports", ())}
        for container in pod.containers:
            for port in container["ports"]:
                open_to_kin = any("ports" not in rule for rule in own[0]["ingress"])
                assert open_to_kin or {port["name"], port["containerPort"]} & admitted, f"{pod} {port}"


@every_case
def test_only_routers_of_the_model_reach_its_targets_and_drafts(case: Case) -> None:
    for policy in case.of_kind("NetworkPolicy"):
        labels = policy["spec"]["podSelector"]["matchLabels"]
        role, model = labels["app.kubernetes.io/component"], labels["specdecode.io/model"]
        if role == "router":
            continue
        rules = [r for r in policy["spec"]["ingress"] if "grpc" in port_names(r) or "ports" not in r]
        callers = [peer["podSelector"]["matchLabels"] for rule in rules for peer in rule["from"]]
        kin = {"router"} if role != "ray" else {"router", "ray"}
        assert {labels["app.kubernetes.io/component"] for labels in callers} == kin
        assert {labels["specdecode.io/model"] for labels in callers} == {model}


def port_names(rule: Object) -> set[Any]:
    return {port["port"] for port in rule.get("ports", ())}


@every_case
def test_gpus_of_a_target_are_those_that_share_the_model(case: Case) -> None:
    values = effective_values(case)
    for model in values["models"]:
        wanted = model["target"]
        expected = wanted["tensorParallelSize"] if wanted["gpu"]["enabled"] else 0
        owners = [o for o in case.of_kind("StatefulSet", "RayCluster") if is_of(o, model["name"])]
        (owner,) = owners
        pod = list(pods([owner]))[-1]
        limits = pod.containers[0]["resources"]["limits"]
        assert limits.get(wanted["gpu"]["resource"], 0) == expected
        replicas = wanted["replicas"]
        if owner["kind"] == "RayCluster":
            (group,) = owner["spec"]["workerGroupSpecs"]
            head = owner["spec"]["headGroupSpec"]
            assert (group["replicas"], group["rayStartParams"]["num-gpus"]) == (replicas, str(expected))
            assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"
            for container in head["template"]["spec"]["containers"]:
                assert wanted["gpu"]["resource"] not in container["resources"]["limits"]
        elif not wanted["keda"]["enabled"]:
            assert owner["spec"]["replicas"] == replicas


def is_of(owner: Object, model: str) -> bool:
    return bool(owner["metadata"]["labels"]["specdecode.io/model"] == model)


def effective_values(case: Case) -> Object:
    """The values of each model as the chart should see them, put together by the tests' own rules."""
    files = [CHART / "values.yaml", *(CHART / file for file in case.files)]
    values = merge(*(yaml.safe_load(file.read_text()) for file in files), case.values)
    models = [
        {
            "name": m["name"],
            **{role: merge(values[role], m.get(role, {})) for role in ("router", "target", "draft")},
        }
        for m in values["models"]
    ]
    return {**values, "models": models}


@every_case
def test_every_mount_has_a_volume_and_every_volume_a_source_of_this_release(case: Case) -> None:
    made = {
        (kind, o["metadata"]["name"])
        for kind in ("ConfigMap", "PersistentVolumeClaim")
        for o in case.of_kind(kind)
    }
    for pod in pods(case.objects):
        volumes = by_name(pod.spec["volumes"])
        for container in pod.all_containers:
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made
        claim = volumes.get("cache", {}).get("persistentVolumeClaim")
        if claim is not None and case.name != "existing-claim":
            assert ("PersistentVolumeClaim", claim["claimName"]) in made


@every_case
def test_only_the_download_gets_the_token(case: Case) -> None:
    for pod in pods(case.objects):
        for container in pod.containers:
            assert "HF_TOKEN" not in {entry["name"] for entry in container.get("env", ())}


@every_case
def test_common_labels_are_on_all_objects(case: Case) -> None:
    for made in case.objects:
        if made["metadata"]["name"] in ("r-more", "more"):
            continue
        labels = made["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "r"
        if case.name == "labels":
            assert labels["team"] == "ml"
            assert made["metadata"]["annotations"]["owner"] == "ml"


def test_a_change_of_one_role_starts_no_other_role_anew() -> None:
    before = {pod.role: pod.annotations for pod in serving_pods(CASES[0].objects)}
    changed = Case("changed", values={"router": {"settings": {"num_draft_tokens": 3}}})
    after = {pod.role: pod.annotations for pod in serving_pods(changed.objects)}
    assert {role for role in before if before[role] != after[role]} == {"router"}


def test_notes_tell_of_the_first_request_and_of_traces(tmp_path: Any) -> None:
    values = {"telemetry": {"otlpEndpoint": "collector:4317", "tracesUrl": "http://traces.example.org"}}
    file = ("--values", str(CHART / "values-cpu-demo.yaml"))
    done = helm("install", "r", str(CHART), *file, "--dry-run=client", values=values)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "port-forward service/r-specdecode-demo-router 50051 8080" in notes
    assert '"model": "smollm2-135m-instruct"' in notes
    assert "collector:4317; look at them at http://traces.example.org" in notes


def mounted(case: Case, pod: Pod) -> dict[str, Any]:
    """Sections of the file that the pod's services read."""
    (config,) = [v for v in pod.spec["volumes"] if v["name"] == "config"]
    made = case.named("ConfigMap", config["configMap"]["name"])
    sections: dict[str, Any] = yaml.safe_load(made["data"]["specdecode.yaml"])
    return sections


def dashboards() -> Iterator[str]:
    yield from (path.name for path in (CHART / "files" / "dashboards").glob("*.json"))


@pytest.mark.skipif(not any(dashboards()), reason="no dashboards yet")
def test_dashboards_and_rules_are_the_files_of_deploy() -> None:
    (case,) = [case for case in CASES if case.name == "monitoring"]
    shown = {n: t for o in case.of_kind("ConfigMap") for n, t in o["data"].items() if n.endswith(".json")}
    files = {
        path.name: json.loads(path.read_text()) for path in (ROOT / "deploy" / "grafana").rglob("*.json")
    }
    assert {name: json.loads(text) for name, text in shown.items()} == files
    assert case.of_kind("PrometheusRule")


def test_schema_and_readme_are_what_would_be_generated() -> None:
    command = [sys.executable, "deploy/helm/generate.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
