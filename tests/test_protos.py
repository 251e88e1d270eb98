"""The committed stubs are what protoc makes of the protos, and the protos keep buf's rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROTOS = sorted((ROOT / "protos/specdecode/v1").glob("*.proto"))


def test_committed_stubs_are_what_protoc_generates(tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", "-Iprotos/third_party"),
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")),
            *(str(path.relative_to(ROOT)) for path in PROTOS),
        ],
        cwd=ROOT,
        check=True,
    )
    generated = {path.name: path.read_text() for path in (tmp_path / "specdecode/v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "specdecode/v1").glob("*_pb2*.py*")}
    assert len(generated) == 3 * len(PROTOS)
    assert generated == committed, "run `make protos`"


@pytest.mark.parametrize("command", [["lint"], ["build", "-o", "/dev/null"]], ids=["lint", "build"])
def test_buf_accepts_the_protos(command: list[str]) -> None:
    buf = Path(sys.executable).with_name("buf")
    result = subprocess.run([str(buf), *command], cwd=ROOT / "protos", capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
