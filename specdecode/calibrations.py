"""Calibrations that are kept: what one was measured on, where it lies, and whether it may be used.

`<cache>/calibration/<hash of the key>.json`, one for each role, model, dtype, device and set of libraries.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from filelock import BaseFileLock, FileLock, Timeout

from specdecode import __version__
from specdecode.cache import cache_root
from specdecode.cost_tables import Calibration
from specdecode.errors import InvalidArgumentError
from specdecode.measuring import StoppedError, never

if TYPE_CHECKING:
    from specdecode.lm.model import LoadedModel

logger = logging.getLogger(__name__)

_LOCK_POLL_SECONDS = 0.2

Role = Literal["target", "draft"]
Key = Mapping[str, str]


def calibration_dir() -> Path:
    """`<cache>/calibration`; it may not exist yet."""
    return cache_root() / "calibration"


def path_of(key: Key) -> Path:
    """Where a calibration of this key is kept."""
    text = json.dumps(dict(key), sort_keys=True)
    return calibration_dir() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def key_of(role: Role, model: LoadedModel | None, **more: object) -> dict[str, str]:
    """What is measured, and on what; another key is another machine.

    Args:
        role: of the service.
        model: None for a draft service that only looks up.
        more: of the service's settings, what changes how long things take.
    """
    import torch
    import transformers

    key = {"role": role, "specdecode": __version__, "python": platform.python_version()}
    if model is None:
        key |= {"model": "none", "device": device_name("cpu")}
    else:
        key |= {
            "model": model.name,
            "config": _config_digest(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": device_name(model.device.type),
            "threads": str(torch.get_num_threads()),
            "kernels": "none" if model.kernels is None else model.kernels.digest,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    if model is not None and model.ranks is not None:
        key["ranks"] = str(model.ranks.size)
    return key | {name: str(value) for name, value in more.items()}


def device_name(kind: str) -> str:
    """Of the GPU, or of the CPU with the cores that this process may use."""
    if kind == "cpu":
        return f"{_cpu_name()} ({_num_cores()} cores)"
    import torch

    return torch.cuda.get_device_name() if kind == "cuda" and torch.cuda.is_available() else kind


def find(key: Key) -> Calibration | None:
    """The calibration that is kept for this key; None if there is none.

    Raises:
        InvalidArgumentError: the file is damaged, or was measured on something else.
    """
    path = path_of(key)
    if not path.exists():
        return None
    found = Calibration.load(path)
    if dict(found.key) != dict(key):
        differing = sorted(name for name in {*found.key, *key} if found.key.get(name) != key.get(name))
        raise InvalidArgumentError.of(
            "calibration", f"{path} was measured on something else: {', '.join(differing)} differ"
        )
    return found


def keep(calibration: Calibration) -> None:
    """Puts it where `find` finds it; a cache that can't be written to is no error."""
    path = path_of(calibration.key)
    try:
        calibration.save(path)
    except OSError as error:
        logger.warning("the calibration is not kept: %s", error)


def kept_or_measured(
    key: Key,
    measure: Callable[[], Calibration],
    refresh: bool = False,
    stopped: Callable[[], bool] = never,
) -> Calibration:
    """The calibration that is kept, if it is whole and of this key; else it is measured and kept.

    Of all processes of this machine one measures at a time, lest they measure one another.

    Raises:
        StoppedError: `stopped` said so while another process measured.
    """
    with _measuring_alone(stopped):
        found = None if refresh else _usable(key)
        if found is None:
            found = measure()
            keep(found)
        else:
            logger.info("costs are known from %s", path_of(key))
        return found


def _usable(key: Key) -> Calibration | None:
    try:
        return find(key)
    except InvalidArgumentError as error:
        logger.warning("measuring again: %s", error.message)
        return None


@contextmanager
def _measuring_alone(stopped: Callable[[], bool]) -> Iterator[None]:
    lock = None
    try:
        calibration_dir().mkdir(parents=True, exist_ok=True)
        lock = FileLock(calibration_dir() / ".lock")
        _acquire(lock, stopped)
    except OSError as error:
        # A timeout of the lock is one, too, but is not let out of `_acquire`.
        logger.warning("other processes may measure at the same time: %s", error)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _acquire(lock: BaseFileLock, stopped: Callable[[], bool]) -> None:
    told = False
    while True:
        try:
            lock.acquire(timeout=_LOCK_POLL_SECONDS)
        except Timeout:
            if stopped():
                raise StoppedError from None
            if not told:
                logger.info("another process of this machine measures; waiting for it")
            told = True
        else:
            return


def of_this_machine(model: str | None = None) -> Calibration:
    """The newest kept calibration of a target (of this name) here, with the newest drafters' costs.

    Raises:
        InvalidArgumentError: there is none; what to run.
    """
    targets, drafts = _here("target"), _here("draft")
    target = next((found for found in targets if model in (None, found.key.get("model"))), None)
    if target is None:
        what = "this machine" if model is None else f"{model!r} on this machine"
        raise InvalidArgumentError.of(
            "calibration", f"none of {what} is kept; run specdecode calibrate, or give --calibration a file"
        )
    costs = {name: costs for found in reversed(drafts) for name, costs in found.drafts.items()}
    return replace(target, drafts=costs)


def _here(role: Role) -> list[Calibration]:
    """Usable ones, the newest first."""
    paths = sorted(calibration_dir().glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    found = []
    for path in paths:
        try:
            calibration = Calibration.load(path)
        except InvalidArgumentError as error:
            logger.warning("%s", error.message)
            continue
        if calibration.key.get("role") == role and calibration.key.get("device") in _devices():
            found.append(calibration)
    return found


def _devices() -> set[str]:
    return {device_name("cpu"), device_name("cuda")}


def _config_digest(model: LoadedModel) -> str:
    """Of what the configuration says about shapes; not of where it lies or who wrote it."""
    config = {
        name: value
        for name, value in model.module.config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    shape = [config, model.vocab_size, model.num_parameters]
    return hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine() or "cpu")


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
