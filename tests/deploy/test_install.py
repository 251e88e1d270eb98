"""Helm installs, upgrades, rolls back and uninstalls the chart against an API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.api_server import RESOURCES, api_server
from tests.deploy.cases import DEMO, merge
from tests.deploy.chart import CHART, NAMESPACE, Case, helm

pytestmark = pytest.mark.usefixtures("real_helm")

VALUES = {"modelCache": {"type": "claim"}, "tests": {"enabled": False}}
PLURALS = {kind: plural for kinds in RESOURCES.values() for plural, kind in kinds.items()}


def rendered(values: Any) -> dict[str, set[str]]:
    """Names by plural, as `helm template` has them."""
    found: dict[str, set[str]] = {}
    for made in Case("install", DEMO, values).objects:
        found.setdefault(PLURALS[made["kind"]], set()).add(made["metadata"]["name"])
    return found


def test_a_release_lives_and_ends(tmp_path: Path) -> None:
    with api_server() as (address, cluster):
        home = {"HELM_CACHE_HOME": str(tmp_path / "cache"), "HELM_CONFIG_HOME": str(tmp_path / "config")}
        where = ("--kube-apiserver", address, "--namespace", NAMESPACE)
        charted = ("r", str(CHART), "--values", str(CHART / DEMO[0]), "--disable-openapi-validation")

        def run(*args: str, values: Any = None) -> str:
            done = helm(*args, *where, values=values, KUBECONFIG=str(tmp_path / "none"), **home)
            assert done.returncode == 0, f"{args[0]}: {done.stderr}"
            return done.stdout

        def tokens_drafted() -> int:
            text = cluster.objects["configmaps", "r-specdecode-demo-router"]["data"]["specdecode.yaml"]
            return int(yaml.safe_load(text)["router"].get("num_draft_tokens", 8))

        run("install", *charted, values=VALUES)
        assert cluster.kinds() == rendered(VALUES)
        changed = merge(
            VALUES, {"router": {"settings": {"num_draft_tokens": 3}}, "draft": {"enabled": False}}
        )
        run("upgrade", *charted, values=changed)
        assert cluster.kinds() == rendered(changed)
        assert "r-specdecode-demo-draft" not in cluster.kinds()["deployments"]
        assert tokens_drafted() == 3
        run("rollback", "r", "1")
        assert cluster.kinds() == rendered(VALUES)
        assert tokens_drafted() == 8
        history = json.loads(run("history", "r", "--output", "json"))
        assert [entry["status"] for entry in history] == ["superseded", "superseded", "deployed"]
        run("uninstall", "r")
        # Models are kept: they took hours to fetch.
        assert cluster.kinds() == {"persistentvolumeclaims": {"r-specdecode-models"}}
