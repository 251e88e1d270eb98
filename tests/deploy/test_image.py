"""The Dockerfile: what it promises, and its commands run for real where that needs no engine."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import specdecode
from specdecode.probe import probe
from specdecode.serving import Server
from tests.deploy.chart import CHART, ROOT
from tests.deploy.dockerfile import instructions, lineage, stages

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
IMAGES = ("cpu", "cuda")
SECONDS = 240


def run(command: str, cwd: Path, **environment: str) -> str:
    """A RUN instruction's command as its shell runs it; its output."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def commands(stage: str) -> list[str]:
    return stages(DOCKERFILE)[stage].of("RUN")


@pytest.mark.parametrize("image", IMAGES)
def test_images_are_pinned_unprivileged_and_checked(image: str) -> None:
    stages_of = lineage(stages(DOCKERFILE), image)
    ((_, base),) = [found for found in instructions(DOCKERFILE.read_text()) if found[0] == "ARG"][:1]
    assert base.startswith("BASE=python:3.12.")
    assert stages_of[0].base == "${BASE}"
    assert stages_of[-1].of("USER") == ["10001:10001"]
    assert stages_of[-1].instructions[-1][0] == "USER", "nothing runs as root after it"
    (check,) = [argument for stage in stages_of for argument in stage.of("HEALTHCHECK")]
    assert check.endswith('CMD ["python", "-m", "specdecode.probe"]')
    copied = [argument for stage in stages_of for argument in stage.of("COPY")]
    assert copied == [f"--from=builder-{image} /opt/specdecode /opt/specdecode"], "no build tools, no sources"


def test_user_and_version_are_those_of_the_chart() -> None:
    import yaml

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert values["securityContext"] == {"runAsUser": 10001, "runAsGroup": 10001}
    assert chart["appVersion"] == chart["version"] == specdecode.__version__


def copied_files(directory: Path) -> None:
    """What `COPY . .` copies: all that .dockerignore does not leave out."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert lines[1] == "*"
    for name in kept:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, directory / name)
    assert not any(fnmatch.fnmatch(path.name, "*.pyc") for path in directory.rglob("*"))


@pytest.mark.parametrize("stage", ["builder-cpu", "builder-cuda"])
def test_the_list_of_packages_is_that_of_the_package_and_wholly_pinned(stage: str, tmp_path: Path) -> None:
    copied_files(tmp_path)
    listing, _, install = commands(stage)[0].partition(" && ")
    assert install.startswith("pip install ")
    assert "--constraint constraints.txt" in install
    run(listing, tmp_path)
    wanted = (tmp_path / "requirements.txt").read_text().splitlines()
    assert any(line.startswith("grpcio>=") for line in wanted)
    assert any(line.startswith("ray>=") for line in wanted) is (stage == "builder-cuda")
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (tmp_path / "constraints.txt").read_text().splitlines()
    }
    names = {canonicalize_name(Requirement(line).name) for line in wanted}
    assert names <= pinned


@pytest.mark.skipif("HELM" not in os.environ, reason="pip fetches a build tool: make test-deploy")
def test_the_package_installs_from_what_is_copied_and_its_entry_points_answer(tmp_path: Path) -> None:
    build, prefix = tmp_path / "build", tmp_path / "specdecode"
    build.mkdir()
    copied_files(build)
    venv.create(prefix, with_pip=True)
    # Dependencies are those of this environment: the image's own are gigabytes.
    for parent in {str(Path(module.__file__ or "").parents[1]) for module in (pytest, __import__("grpc"))}:
        (next((prefix / "lib").glob("python*")) / "site-packages" / "here.pth").write_text(f"{parent}\n")
    command = commands("builder-cpu")[-1].replace("/opt/specdecode", str(prefix))
    assert command.startswith("pip install --no-deps . && pip freeze --all >")
    path = f"{prefix / 'bin'}{os.pathsep}{os.environ['PATH']}"
    run(command, build, PATH=path, PYTHONPATH="")
    assert "specdecode" in (prefix / "packages.txt").read_text()
    shutil.rmtree(build)
    for answered in ("specdecode --version", *(f"python -m {m} --version" for m in MODULES)):
        out = run(answered, tmp_path, PATH=path, PYTHONPATH="")
        assert out.strip() == specdecode.__version__, answered
    where = run(
        "python -c 'import specdecode; print(specdecode.__file__)'", tmp_path, PATH=path, PYTHONPATH=""
    )
    assert where.startswith(str(prefix)), "the installed package, not this checkout"
    files = run(
        "python -c 'import specdecode.models as m; print(m._DRAFTS)'", tmp_path, PATH=path, PYTHONPATH=""
    )
    assert list(Path(files.strip()).glob("*/config.json")), "a shipped draft came along"


MODULES = ("router", "target_service", "draft_service")


def test_hadolint_finds_nothing() -> None:
    path = os.environ.get("HADOLINT") or shutil.which("hadolint")
    if path is None:
        pytest.skip("no hadolint here; make test-deploy brings it")
    done = subprocess.run([path, str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


async def test_the_health_check_tells_serving_from_not_serving_and_from_nobody() -> None:
    import asyncio

    server = Server(["x"], 2**20)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    assert await asyncio.to_thread(probe, address) == f"{address}: not serving"
    server.set_serving()
    assert await asyncio.to_thread(probe, address) == ""
    command = [sys.executable, "-m", "specdecode.probe"]
    environment = {**os.environ, "SPECDECODE_PROBE": address}
    ended = await asyncio.to_thread(subprocess.run, command, env=environment, timeout=60, check=False)
    assert ended.returncode == 0
    await server.drain(None)
    assert "refused" in await asyncio.to_thread(probe, address)
    gone = await asyncio.to_thread(subprocess.run, [*command, address], timeout=60, check=False)
    assert gone.returncode == 1
