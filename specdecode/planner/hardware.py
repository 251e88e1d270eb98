"""GPUs as a roofline sees them: peak rates of the data sheets, and the shares of them that serving
reaches."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from specdecode.errors import InvalidArgumentError

DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


def _check(field: str, value: Any, *, above_zero: bool, most: float = math.inf) -> None:
    limit = f"a finite number {'above' if above_zero else 'of at least'} 0"
    limit += f", at most {most:g}" if most < math.inf else ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidArgumentError.of(field, f"{value!r} is not {limit}")
    if value < 0 or (above_zero and value == 0) or value > most:
        raise InvalidArgumentError.of(field, f"{value!r} is not {limit}")


@dataclass(frozen=True)
class HardwareProfile:
    """One GPU and its links to the others of its group.

    The efficiencies and the overhead are what the published fit of Llama-3.1-8B on an H100 implies (5.886
    ms for the weights, 21.01 µs a token, 39.26 ns a cached token, 1.207 ms outside the forward); a file may
    say otherwise.

    Attributes:
        name: shown.
        flops: dense peak in FLOP/s by dtype of the weights; a dtype that is not named is computed in bf16.
        memory_bandwidth: bytes/s.
        memory_bytes: of one GPU.
        link_bandwidth: bytes/s in one direction from one GPU to its group.
        link_seconds: latency of one all-reduce.
        overhead_seconds: of every forward, the draft's too, beside what the GPU does.
        compute_efficiency: share of `flops` that matrix products reach.
        weight_efficiency: share of `memory_bandwidth` that reading weights reaches.
        kv_efficiency: the same for reading the KV cache.
        memory_share: of `memory_bytes` that weights and KV may fill.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float
    link_seconds: float = 8e-6
    overhead_seconds: float = 1.207e-3
    compute_efficiency: float = 0.72
    weight_efficiency: float = 0.77
    kv_efficiency: float = 1.0
    memory_share: float = 0.9

    def __post_init__(self) -> None:
        for field in ("memory_bandwidth", "memory_bytes", "link_bandwidth"):
            _check(field, getattr(self, field), above_zero=True)
        for field in ("link_seconds", "overhead_seconds"):
            _check(field, getattr(self, field), above_zero=False)
        for field in ("compute_efficiency", "weight_efficiency", "kv_efficiency", "memory_share"):
            _check(field, getattr(self, field), above_zero=True, most=1)
        if not isinstance(self.flops, Mapping) or "bf16" not in self.flops:
            raise InvalidArgumentError.of("flops", "must name at least bf16")
        for dtype, rate in self.flops.items():
            if dtype not in DTYPE_BYTES:
                raise InvalidArgumentError.of(f"flops.{dtype}", f"is none of {', '.join(DTYPE_BYTES)}")
            _check(f"flops.{dtype}", rate, above_zero=True)

    def flops_of(self, dtype: str) -> float:
        """FLOP/s that matrix products with weights of this dtype reach."""
        return self.flops.get(dtype, self.flops["bf16"]) * self.compute_efficiency


PROFILES = {
    "a100": HardwareProfile(
        name="A100 SXM 80 GB",
        flops={"bf16": 312e12, "fp16": 312e12, "int8": 624e12, "fp32": 156e12},
        memory_bandwidth=2.039e12,
        memory_bytes=80e9,
        link_bandwidth=300e9,
    ),
    "h100": HardwareProfile(
        name="H100 SXM 80 GB",
        flops={"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "int8": 1979e12, "fp32": 495e12},
        memory_bandwidth=3.35e12,
        memory_bytes=80e9,
        link_bandwidth=450e9,
    ),
    "h100-nvl": HardwareProfile(
        name="H100 NVL 94 GB",
        flops={"bf16": 835e12, "fp16": 835e12, "fp8": 1671e12, "int8": 1671e12, "fp32": 418e12},
        memory_bandwidth=3.938e12,
        memory_bytes=94e9,
        link_bandwidth=300e9,
    ),
    "h200": HardwareProfile(
        name="H200 SXM 141 GB",
        flops={"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "int8": 1979e12, "fp32": 495e12},
        memory_bandwidth=4.8e12,
        memory_bytes=141e9,
        link_bandwidth=450e9,
    ),
    "b200": HardwareProfile(
        name="B200 SXM 180 GB",
        flops={"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12, "int8": 4500e12, "fp32": 1125e12},
        memory_bandwidth=7.7e12,
        memory_bytes=180e9,
        link_bandwidth=900e9,
    ),
    "l4": HardwareProfile(
        name="L4 24 GB",
        flops={"bf16": 121e12, "fp16": 121e12, "fp8": 242e12, "int8": 242e12, "fp32": 60e12},
        memory_bandwidth=300e9,
        memory_bytes=24e9,
        link_bandwidth=32e9,
        link_seconds=20e-6,
    ),
}


def hardware_profile(name: str) -> HardwareProfile:
    """A profile by name (`h100`), or from a JSON, YAML or TOML file with the fields of `HardwareProfile`."""
    if name.lower() in PROFILES:
        return PROFILES[name.lower()]
    path = Path(name)
    if path.suffix not in (".json", ".yaml", ".yml", ".toml"):
        known = ", ".join(PROFILES)
        raise InvalidArgumentError.of(
            "gpu", f"{name!r} is none of {known}, this, nor a .json, .yaml or .toml file"
        )
    try:
        return _profile(_document(path), path.stem)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidArgumentError.of("gpu", f"{path} can't be read: {error}") from error
    except InvalidArgumentError as error:
        raise InvalidArgumentError.of("gpu", f"{path}: {error.message}") from error


def _document(path: Path) -> Any:
    text = path.read_text()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def _profile(document: Any, name: str) -> HardwareProfile:
    if not isinstance(document, dict):
        raise InvalidArgumentError.of("profile", "must be an object")
    known = {field.name for field in fields(HardwareProfile)}
    for field in document:
        if field not in known:
            raise InvalidArgumentError.of(str(field), f"is none of {', '.join(sorted(known))}")
    # YAML takes 3e12 for a text.
    flops = document.get("flops")
    flops = {key: _number(rate) for key, rate in flops.items()} if isinstance(flops, dict) else flops
    values = {field: value if field == "name" else _number(value) for field, value in document.items()}
    try:
        return HardwareProfile(**{"name": name, **values, "flops": flops})
    except TypeError as error:
        raise InvalidArgumentError.of("profile", f"is not whole: {error}") from error


def _number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
