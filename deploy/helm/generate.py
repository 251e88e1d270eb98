"""Writes values.schema.json and README.md of the chart: from its values.yaml, and from the services' options.

python deploy/helm/generate.py            # both files anew
python deploy/helm/generate.py --check    # exit code 1 if one is not what would be written
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from specdecode.config import DraftSettings, RouterSettings, ServiceSettings, TargetSettings

CHART = Path(__file__).parent / "specdecode"
ROLES: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}
SET_BY_CHART = {
    "router": "model port http_port targets draft keys_path",
    "target": "model port device tensor_parallel replicas draft_replicas ray_address gpus_per_rank "
    "cores_per_replica accelerator_type placement_seconds max_restarts registry replica_id advertised_host",
    "draft": "model port device registry replica_id advertised_host",
}
"""Options that follow from values of their own, and can't be set below `settings`."""
SET_FOR_ALL = (
    "host drain_seconds otlp_endpoint metrics_port "
    "mesh_ca mesh_cert mesh_key mesh_name tls_cert tls_key tls_client_ca tls_client_names health_port"
)

Schema = dict[str, Any]

_QUANTITY: Schema = {"type": ["string", "number"], "pattern": "^[0-9.]+(m|[KMGTPE]i?|k)?$"}
_QUANTITIES: Schema = {"type": "object", "additionalProperties": _QUANTITY}
_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_SECONDS: Schema = {"type": "integer", "minimum": 0, "maximum": 3600}

BY_NAME: dict[str, Schema] = {
    "resources": {
        "type": "object",
        "properties": {"requests": _QUANTITIES, "limits": _QUANTITIES},
        "additionalProperties": False,
    },
    "sharedMemory": _QUANTITY,
    "size": _QUANTITY,
    "annotations": _STRINGS,
    "labels": _STRINGS,
    "nodeSelector": _STRINGS,
    "podLabels": _STRINGS,
    "podAnnotations": _STRINGS,
    "commonLabels": _STRINGS,
    "commonAnnotations": _STRINGS,
    "affinity": {"type": "object"},
    "behavior": {"type": "object"},
    "tolerations": _OBJECTS,
    "topologySpreadConstraints": _OBJECTS,
    "env": _OBJECTS,
    "metrics.list": _OBJECTS,
    "parentRefs": _OBJECTS,
    "clients": _OBJECTS,
    "scrapers": _OBJECTS,
    "dns": _OBJECTS,
    "downloads": _OBJECTS,
    "collector": _OBJECTS,
    "port": _PORT,
    "healthPort": _PORT,
    "replicas": _COUNT,
    "minReplicas": _COUNT,
    "maxReplicas": _COUNT,
    "drainSeconds": _SECONDS,
    "preStopSeconds": _SECONDS,
    "startupSeconds": {"type": "integer", "minimum": 1, "maximum": 86400},
    "tensorParallelSize": {"type": "integer", "minimum": 1, "maximum": 16},
    "attentionHeads": {"type": "integer", "minimum": 0},
    "runAsUser": {"type": "integer", "minimum": 1},
    "runAsGroup": {"type": "integer", "minimum": 1},
    "maxUnavailable": _COUNT,
    "maxRestarts": {"type": "integer", "minimum": -1},
    "targetCPUPercent": {"type": "integer", "minimum": 0, "maximum": 1000},
    "price": {"type": "number", "exclusiveMinimum": 0},
    "waiting": {"type": "number", "exclusiveMinimum": 0},
}
BY_PATH: dict[str, Schema] = {
    "engine.mode": {"enum": ["standalone", "ray"]},
    "target.discovery": {"enum": ["static", "dns"]},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "image.digests.cpu": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.digests.cuda": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "modelCache.type": {"enum": ["emptyDir", "hostPath", "claim", "existingClaim"]},
    "modelCache.accessModes": {
        "type": "array",
        "items": {"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]},
        "minItems": 1,
    },
    "router.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "router.autoscaling.metrics": _OBJECTS,
    "tls.certManager.issuer.kind": {"enum": ["Issuer", "ClusterIssuer"]},
    "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
    "models": {"type": "array", "items": {"$ref": "#/$defs/model"}},
}
MODEL: Schema = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {
            "type": "string",
            "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            "maxLength": 16,
        },
        **{role: {"$ref": f"#/$defs/{role}"} for role in ROLES},
    },
}


def main() -> int:
    """Writes or compares; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if files differ")
    check = parser.parse_args().check
    wanted = {"values.schema.json": schema_text(), "README.md": readme_text()}
    stale = [name for name, text in wanted.items() if _read(CHART / name) != text]
    for name in stale:
        print(f"{CHART / name} is {'stale; run make chart' if check else 'written'}")
        if not check:
            (CHART / name).write_text(wanted[name], encoding="utf-8")
    return 1 if check and stale else 0


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _values() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return values


# The schema


def schema_text() -> str:
    """The schema of all values: nothing is taken that values.yaml does not have."""
    root = _inferred("", _values())
    definitions: Schema = {role: root["properties"].pop(role) for role in ROLES}
    for role, schema in definitions.items():
        schema["properties"]["settings"] = settings_schema(role)
        root["properties"][role] = {"$ref": f"#/$defs/{role}"}
    root["properties"]["global"] = {"type": "object"}  # Helm gives it to every chart
    definitions["model"] = MODEL
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _inferred(path: str, value: Any) -> Schema:
    name = path.rpartition(".")[2]
    if path in BY_PATH:
        return dict(BY_PATH[path])
    if name in BY_NAME:
        return dict(BY_NAME[name])
    match value:
        case dict():
            properties = {key: _inferred(f"{path}.{key}".lstrip("."), item) for key, item in value.items()}
            return {"type": "object", "properties": properties, "additionalProperties": False}
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": 0}
        case str():
            return {"type": "string"}
        case list():
            return {"type": "array", "items": {"type": "string"}}
    raise TypeError(f"{path}: {value!r}")


def settings_schema(role: str) -> Schema:
    """Options of a service that an operator may set, with their ranges."""
    cls = ROLES[role]
    reserved = {*SET_BY_CHART[role].split(), *SET_FOR_ALL.split()}
    full = cls.model_json_schema()["properties"]
    properties = {name: _option(full[name], cls, name) for name in sorted(full) if name not in reserved}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _option(schema: Schema, cls: type[ServiceSettings], name: str) -> Schema:
    if "ByteSize" in str(cls.model_fields[name].annotation):
        kinds = [_SIZE, {"type": "integer", "minimum": 1}]
        kinds += [{"type": "null"}] if schema["default"] is None else []
    else:
        kinds = schema.get("anyOf", [schema])
    allowed = [_allowed(kind) for kind in kinds]
    one = allowed[0] if len(allowed) == 1 else {"anyOf": allowed}
    return {"description": schema.get("description", name), **one}


def _allowed(kind: Schema) -> Schema:
    """What of pydantic's schema Helm should hold a value to; Helm takes null for "not given"."""
    match kind:
        case {"type": "null"}:
            return {"const": "none"}
        case {"type": "array"}:
            return {"type": ["array", "string"]}
    return {key: value for key, value in kind.items() if key in _LIMITS}


_SIZE: Schema = {"type": "string", "pattern": "^(none|[0-9.]+ ?([kKMGTP]i?)?B?)$"}
_LIMITS = (
    "type",
    "enum",
    "const",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "pattern",
)


# The README


def readme_text() -> str:
    """README.md: its beginning by hand, and a row for each value."""
    rows = "\n".join(f"| `{path}` | `{default}` | {text} |" for path, default, text in documented())
    beginning = (CHART / "README.head.md").read_text(encoding="utf-8")
    return f"{beginning}\n| value | default | what it is |\n| --- | --- | --- |\n{rows}\n"


def documented() -> Iterator[tuple[str, str, str]]:
    """(path, default, description) of each value that has a description, in order."""
    values = _values()
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    parents: list[tuple[int, str]] = []
    text = ""
    for line in lines:
        if (comment := re.match(r"\s*# (-- )?(.*)", line)) is not None:
            text = comment[2] if comment[1] else f"{text} {comment[2]}".strip()
            continue
        if (key := re.match(r"(\s*)([A-Za-z]+):", line)) is None:
            text = "" if not line.strip() else text
            continue
        indent = len(key[1])
        parents = [(depth, name) for depth, name in parents if depth < indent] + [(indent, key[2])]
        if text:
            path = ".".join(name for _, name in parents)
            yield path, json.dumps(_at(values, path), ensure_ascii=False), text.replace("|", "\\|")
        text = ""


def _at(values: dict[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found[name]
    return found


if __name__ == "__main__":
    sys.exit(main())
