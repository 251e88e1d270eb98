"""Compiles the kernels for this machine and keeps the library in the cache: a few seconds, once."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from specdecode.cache import cache_root

_HERE = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-fno-trapping-math", "-fno-math-errno")
SOURCES = {
    # Sums may be taken in any order, which vector instructions need; NaN and infinity keep their meaning.
    _HERE / "kernels.cpp": ("-fassociative-math", "-fno-signed-zeros"),
    _HERE / "products.cpp": (),
    _HERE / "layers.cpp": (),
    # Noise is the same bits on every machine.
    _HERE / "sampling.cpp": ("-ffp-contract=off",),
    _HERE / "drafting.cpp": ("-ffp-contract=off",),
}
"""Each source with the flags of its own."""
_HEADERS = (_HERE / "numbers.h", _HERE / "rows.h")
_BUILD_SECONDS = 120


class BuildError(Exception):
    """The kernels can't be compiled here; the message says why."""


def build_library() -> Path:
    """The compiled kernels, from the cache or freshly built.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    compiler = next((found for name in _compilers() if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError("no C++ compiler is installed (c++, g++ or clang++; CXX names another)")
    texts = [path.read_text() for path in (*_HEADERS, *SOURCES)]
    flags = [*_FLAGS, *(flag for own in SOURCES.values() for flag in own)]
    parts = (*texts, *flags, _version(compiler), _processor())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = cache_root() / "kernels" / f"{digest}.so"
    if not library.exists():
        _compile(compiler, library)
    return library


def _compilers() -> tuple[str, ...]:
    named = os.environ.get("CXX")
    return (named,) if named else _COMPILERS


def _compile(compiler: str, library: Path) -> None:
    """Whole or not at all, whoever else compiles at the same time."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as directory:
            objects = []
            for source, flags in SOURCES.items():
                objects.append(str(Path(directory) / f"{source.stem}.o"))
                _run([compiler, *_FLAGS, *flags, "-c", str(source), "-o", objects[-1]])
            partial = Path(directory) / library.name
            _run([compiler, "-shared", "-fopenmp", *objects, "-o", str(partial)])
            partial.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} could not be run: {error}") from error


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} could not be run: {error}") from error
    return done.stdout


@cache
def _processor() -> str:
    """What -march=native depends on: a cache may be shared by machines of several kinds."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"
