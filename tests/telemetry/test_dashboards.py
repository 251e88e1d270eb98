"""Dashboards and rules ask for what services tell; a real Prometheus gets data for each panel."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse

from router.router import Router
from specdecode.cost_tables import StepCosts
from tests.router.client import MODEL, NGRAM, request_for, speculating
from tests.services import Services, eventually
from tests.telemetry.collector import collector

in_one_loop = pytest.mark.asyncio(loop_scope="module")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
SCRAPED = {"metrics_port": 0}

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs Debian's prometheus",
)


def expressions(dashboard: Path) -> list[tuple[str, str]]:
    """(panel, query) of a dashboard."""
    content = json.loads(dashboard.read_text())
    return [(p["title"], target["expr"]) for p in content["panels"] for target in p["targets"]]


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load(RULES.read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(model: Path, other_model: Path) -> AsyncIterator[Services]:
    with collector() as spans:
        settings = SCRAPED | {"otlp_endpoint": spans.address}
        target = settings | {"costs": StepCosts(0.001, 1e-5)}
        async with Services.started(model, other_model, target=target, draft=settings, **settings) as started:
            yield started


async def traffic(services: Services) -> None:
    for request in (
        speculating(request_for(temperature=0, max_tokens=20, ignore_eos=True), 4, MODEL),
        speculating(request_for(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True), 2, NGRAM),
        speculating(request_for(temperature=0, max_tokens=20, ignore_eos=True), 0, NGRAM),
    ):
        await services.generate_one(request)


def ports(services: Services) -> list[int]:
    router: Router = services.router.running.on_stopped.__self__  # type: ignore[attr-defined]
    assert services.drafts is not None
    meters = (router.meters, services.target.meters, services.drafts.meters)
    return [each.port for each in meters if each is not None and each.port is not None]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return str(reply.read().decode())


@in_one_loop
async def test_all_that_is_asked_for_is_told_by_a_service(services: Services) -> None:
    await traffic(services)
    texts = [await asyncio.to_thread(get, f"http://127.0.0.1:{port}/metrics") for port in ports(services)]
    told = {sample.name for text in texts for family in parse(text) for sample in family.samples}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    queries = [expr for dashboard in DASHBOARDS for _, expr in expressions(dashboard)]
    queries += [rule["expr"] for rule in rules()]
    asked = {name for query in queries for name in re.findall(r"\bspecdecode[_:][a-z0-9_:]+", query)}
    assert len(asked) > 40
    assert asked - told - recorded == set()


def test_dashboards_are_told_apart_and_their_panels_have_places() -> None:
    contents = [json.loads(dashboard.read_text()) for dashboard in DASHBOARDS]
    assert len({content["uid"] for content in contents}) == len(contents) == 4
    for content in contents:
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in content["panels"]]
        assert len(set(places)) == len(places) == len({panel["id"] for panel in content["panels"]})


@needs_prometheus
@pytest.mark.parametrize("command", ["check rules rules.yml", "test rules rules_test.yml"])
def test_rules_hold(command: str) -> None:
    ended = subprocess.run(
        ["promtool", *command.split()], cwd=RULES.parent, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@contextmanager
def prometheus(directory: Path, targets: list[int]) -> Iterator[str]:
    """A running Prometheus that scrapes these ports every second; its address."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "specdecode",
                "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in targets]}],
            }
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = (directory / "log").open("w")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        yield str(directory / "log")
    finally:
        process.terminate()
        process.wait(30)
        log.close()


async def address_in(log: str) -> str:
    """Where Prometheus listens, as its log says."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = re.findall(r"[Ll]istening on\"? .*?address=127\.0\.0\.1:(\d+)", Path(log).read_text())
        return bool(found)

    await eventually(is_there, "Prometheus listens")
    return f"http://127.0.0.1:{found[0]}"


@needs_prometheus
@in_one_loop
async def test_each_panel_has_data_of_a_real_prometheus(services: Services, tmp_path: Path) -> None:
    queries = [each for dashboard in DASHBOARDS for each in expressions(dashboard)]
    with prometheus(tmp_path, ports(services)) as log:
        address = await address_in(log)
        missing = dict.fromkeys(f"{panel}: {query}" for panel, query in queries)

        async def all_have_data() -> bool:
            await traffic(services)
            for name in list(missing):
                query = name.split(": ", 1)[1].replace("$__rate_interval", "1m")
                url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
                if json.loads(await asyncio.to_thread(get, url))["data"]["result"]:
                    del missing[name]
            return not missing

        try:
            await eventually(all_have_data, "each panel has data")
        except AssertionError:
            raise AssertionError(f"no data: {list(missing)}") from None
        alerts = json.loads(await asyncio.to_thread(get, f"{address}/api/v1/rules"))
        states = {rule["health"] for group in alerts["data"]["groups"] for rule in group["rules"]}
        assert states == {"ok"}
