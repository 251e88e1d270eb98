"""Kubernetes' schemas, strictly, and those of custom kinds where their definitions lie here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.deploy.chart import Object

CRDS_VARIABLE = "SPECDECODE_TEST_CRDS"
"""A folder with CustomResourceDefinitions; without it, `crds` beside this file."""
_GROUPS = {"apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1", "v1"}

Schema = dict[str, Any]


def crds_directory() -> Path:
    """Where definitions of custom kinds are looked for."""
    named = os.environ.get(CRDS_VARIABLE)
    return Path(named) if named else Path(__file__).parent / "crds"


def is_custom(made: Object) -> bool:
    """Whether Kubernetes itself does not know the kind."""
    return made["apiVersion"] not in _GROUPS


def problems(made: Object, version: str) -> list[str]:
    """What is wrong with an object of Kubernetes' own kinds, for a version such as 1.37."""
    group = made["apiVersion"].split("/")
    name = "-".join([made["kind"].lower(), *(part.split(".")[0] for part in group)])
    return _found(_builtin(name, version), made)


def custom_problems(made: Object) -> list[str] | None:
    """What is wrong with an object of a custom kind; None where its definition is not here."""
    validator = _custom().get((made["apiVersion"], made["kind"]))
    return None if validator is None else _found(validator, made)


def _found(validator: Draft202012Validator, made: Object) -> list[str]:
    name = f"{made['kind']} {made['metadata']['name']}"
    return [
        f"{name}: {'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(made)
    ]


@cache
def _builtin(name: str, version: str) -> Draft202012Validator:
    folder = f"kubernetes-json-schema/v{_full(version)}-local-strict"
    return Draft202012Validator(_contents(f"{folder}/{name}.json", version), registry=_registry(version))


@cache
def _registry(version: str) -> Registry[Any]:
    folder = f"kubernetes-json-schema/v{_full(version)}-local-strict"
    definitions = Resource.from_contents(_contents(f"{folder}/_definitions.json", version))
    return definitions @ Registry()


@cache
def _full(version: str) -> str:
    from kubernetes_validate.utils import all_versions

    return next(str(found) for found in all_versions() if found.startswith(f"{version}."))


def _contents(file: str, version: str) -> Any:
    from kubernetes_validate.utils import schema_contents

    return schema_contents(file, version)


@cache
def _custom() -> Mapping[tuple[str, str], Draft202012Validator]:
    found = {}
    for path in sorted(crds_directory().glob("*.y*ml")):
        for definition in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if not definition or definition.get("kind") != "CustomResourceDefinition":
                continue
            spec = definition["spec"]
            for version in spec["versions"]:
                kind = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                found[kind] = Draft202012Validator(_closed(version["schema"]["openAPIV3Schema"]))
    return found


def _closed(schema: Schema) -> Schema:
    """A schema of OpenAPI as JSON Schema that refuses fields which the API server would drop."""
    made = {name: value for name, value in schema.items() if name in _KEPT}
    for name in ("properties",):
        if name in schema:
            made[name] = {key: _closed(value) for key, value in schema[name].items()}
    if isinstance(schema.get("items"), dict):
        made["items"] = _closed(schema["items"])
    match schema.get("additionalProperties"):
        case dict() as values:
            made["additionalProperties"] = _closed(values)
        case None if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            made[name] = [_partial(part) for part in schema[name]]
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    return made


def _partial(schema: Schema) -> Schema:
    """A part of a combination, which names only what it is about."""
    return {name: value for name, value in schema.items() if name in (*_KEPT, "properties")}


_KEPT = (
    *("type", "enum", "pattern", "required", "format"),
    *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties"),
)
