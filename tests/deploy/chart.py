"""The chart as real Helm renders it, and questions about what came out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "specdecode"
RELEASE = "r"
NAMESPACE = "ns"
ROLES = ("router", "target", "draft")

Object = dict[str, Any]
Values = Mapping[str, Any]


def helm_path() -> str | None:
    """Where Helm is: named by HELM, which `make test-deploy` sets, or on the PATH."""
    return os.environ.get("HELM") or shutil.which("helm")


def helm(*args: str, values: Values | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Helm with these arguments; `values` are given as a file of values by standard input."""
    given = [] if values is None else ["--values", "-"]
    return subprocess.run(
        [helm_path() or "helm", *args, *given],
        input="" if values is None else json.dumps(values),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


@cache
def _rendered(files: tuple[str, ...], values: str) -> tuple[Object, ...]:
    named = [part for file in files for part in ("--values", str(CHART / file))]
    done = helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *named, values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


@dataclass(frozen=True)
class Case:
    """Values to install with: files of the chart, then more values."""

    name: str
    files: tuple[str, ...] = ("values-cpu-demo.yaml",)
    values: Values = field(default_factory=dict)

    @property
    def objects(self) -> Sequence[Object]:
        """What Helm makes of it."""
        return _rendered(self.files, json.dumps(self.values))

    def of_kind(self, *kinds: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] in kinds]

    def named(self, kind: str, name: str) -> Object:
        (found,) = [o for o in self.of_kind(kind) if o["metadata"]["name"] == name]
        return found


def refusal(values: Values, *files: str) -> str:
    """What Helm says to values that are refused."""
    named = [part for file in files for part in ("--values", str(CHART / file))]
    done = helm("template", RELEASE, str(CHART), *named, values=values)
    assert done.returncode != 0, "was not refused"
    return done.stderr


@dataclass(frozen=True)
class Pod:
    """A pod of an object, with the labels that it will have."""

    owner: Object
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Object

    def __str__(self) -> str:
        return f"{self.owner['kind']} {self.owner['metadata']['name']}"

    @property
    def role(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Object]:
        return list(self.spec["containers"])

    @property
    def all_containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", ()), *self.containers]


def pods(objects: Sequence[Object]) -> Iterator[Pod]:
    """The pods that these objects stand for."""
    for found in objects:
        match found["kind"]:
            case "Deployment" | "StatefulSet":
                yield _pod(found, found["spec"]["template"])
            case "RayCluster":
                yield _pod(found, found["spec"]["headGroupSpec"]["template"])
                for group in found["spec"]["workerGroupSpecs"]:
                    yield _pod(found, group["template"])
            case "Pod":
                yield _pod(found, found)


def serving_pods(objects: Sequence[Object]) -> list[Pod]:
    """Those that stay: all but the pod of `helm test`."""
    return [pod for pod in pods(objects) if pod.owner["kind"] != "Pod"]


def _pod(owner: Object, template: Object) -> Pod:
    metadata = template["metadata"]
    return Pod(owner, metadata["labels"], metadata.get("annotations", {}), template["spec"])


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels."""
    wanted = selector.get("matchLabels", {}).items()
    return all(labels.get(name) == value for name, value in wanted)


def merge(*parts: Values) -> Object:
    """Values, later ones over earlier ones, as Helm does it."""
    merged: Object = {}
    for part in parts:
        for name, value in part.items():
            both = isinstance(value, dict) and isinstance(merged.get(name), dict)
            merged[name] = merge(merged[name], value) if both else value
    return merged
