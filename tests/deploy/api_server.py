"""A small API server of Kubernetes in memory: as much as Helm asks for. Objects are kept, nothing runs."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]

RESOURCES = {
    "v1": {
        "secrets": "Secret",
        "configmaps": "ConfigMap",
        "services": "Service",
        "serviceaccounts": "ServiceAccount",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
}
_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?$"
)


class Cluster:
    """What is kept, by (plural, name)."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.lock = threading.Lock()
        self._version = 0

    def kinds(self) -> dict[str, set[str]]:
        """Names by plural, of what is not Helm's own record."""
        found: dict[str, set[str]] = {}
        for (plural, name), kept in self.objects.items():
            if kept.get("type") != "helm.sh/release.v1":
                found.setdefault(plural, set()).add(name)
        return found

    def put(self, plural: str, made: Object) -> Object:
        """Keeps an object under a new version."""
        self._version += 1
        metadata = made["metadata"]
        metadata.setdefault("uid", f"uid-{self._version}")
        metadata["resourceVersion"] = str(self._version)
        self.objects[plural, metadata["name"]] = made
        return made


def _merged(old: Any, patch: Any) -> Any:
    """A JSON merge patch; lists are replaced, which is enough for what is asked here."""
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return patch
    kept = {name: value for name, value in old.items() if patch.get(name, 0) is not None}
    changed = {
        n: _merged(kept.get(n), v) for n, v in patch.items() if v is not None and not n.startswith("$")
    }
    return {**kept, **changed}


_PROTOBUF = b"k8s\0"
"""What a message of Kubernetes in protobuf begins with: Helm writes its releases so."""


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message; numbers as int, all others as bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        assert wire == 2, wire
        size = varint()
        yield number, message[position : position + size]
        position += size


def _pairs(fields: Iterator[tuple[int, Any]], number: int) -> dict[str, bytes]:
    entries = [dict(_fields(value)) for found, value in fields if found == number]
    return {entry[1].decode(): entry.get(2, b"") for entry in entries}


def _secret(message: bytes) -> Object:
    """A Secret, of which Helm's releases are made, from a protobuf envelope."""
    raw = dict(_fields(message.removeprefix(_PROTOBUF)))[2]
    secret = dict(_fields(raw))
    labels = _pairs(_fields(secret[1]), 11)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": dict(_fields(secret[1]))[1].decode(),
            "labels": {name: value.decode() for name, value in labels.items()},
        },
        "data": {name: base64.b64encode(v).decode() for name, v in _pairs(_fields(raw), 2).items()},
        "type": secret[3].decode(),
    }


class _Handler(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        match url.path:
            case "/version":
                return self._answer({"major": "1", "minor": "37", "gitVersion": "v1.37.0"})
            case "/api":
                return self._answer({"kind": "APIVersions", "versions": ["v1"]})
            case "/apis":
                return self._answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()})
        group = url.path.removeprefix("/apis/").removeprefix("/api/")
        if group in RESOURCES:
            return self._answer(_resource_list(group))
        place = _PATH.fullmatch(url.path)
        if place is None or place["plural"] not in _plurals():
            return self._status(404, "NotFound", url.path)
        with self.cluster.lock:
            if place["name"] is not None:
                found = self.cluster.objects.get((place["plural"], place["name"]))
                return self._answer(found) if found else self._status(404, "NotFound", place["name"])
            selector = parse_qs(url.query).get("labelSelector", [""])[0]
            items = [
                kept
                for (plural, _), kept in self.cluster.objects.items()
                if plural == place["plural"] and _selected(selector, kept)
            ]
        kind = _plurals()[place["plural"]][1]
        version = place["core"] or place["group"]
        return self._answer({"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": items})

    def do_POST(self) -> None:
        place, made = self._place(), self._body()
        with self.cluster.lock:
            if (place["plural"], made["metadata"]["name"]) in self.cluster.objects:
                return self._status(409, "AlreadyExists", made["metadata"]["name"])
            return self._answer(self.cluster.put(place["plural"], made), 201)

    def do_PUT(self) -> None:
        with self.cluster.lock:
            return self._answer(self.cluster.put(self._place()["plural"], self._body()))

    def do_PATCH(self) -> None:
        place, patch = self._place(), self._body()
        key = (place["plural"], place["name"])
        applied = "apply-patch" in self.headers["Content-Type"]
        with self.cluster.lock:
            old = self.cluster.objects.get(key)
            if old is None and not applied:
                return self._status(404, "NotFound", place["name"])
            metadata = {"uid": old["metadata"]["uid"]} if old else {}
            made = patch if applied or old is None else _merged(old, patch)
            made["metadata"] |= metadata
            return self._answer(self.cluster.put(place["plural"], made))

    def do_DELETE(self) -> None:
        place = self._place()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.cluster.lock:
            gone = self.cluster.objects.pop((place["plural"], place["name"]), None)
        if gone is None:
            return self._status(404, "NotFound", place["name"])
        return self._answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _place(self) -> Any:
        place = _PATH.fullmatch(urlsplit(self.path).path)
        assert place is not None, self.path
        return place

    def _body(self) -> Any:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return _secret(text) if text.startswith(_PROTOBUF) else yaml.safe_load(text)

    def _status(self, code: int, reason: str, name: str) -> None:
        failed = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        self._answer({**failed, "message": f"{name}: {reason}"}, code)

    def _answer(self, value: Any, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _plurals() -> dict[str, tuple[str, str]]:
    return {plural: (group, kind) for group, kinds in RESOURCES.items() for plural, kind in kinds.items()}


def _groups() -> list[Object]:
    named = [group.split("/") for group in RESOURCES if "/" in group]
    return [
        {
            "name": name,
            "versions": [{"groupVersion": f"{name}/{version}", "version": version}],
            "preferredVersion": {"groupVersion": f"{name}/{version}", "version": version},
        }
        for name, version in named
    ]


def _resource_list(group: str) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for plural, kind in RESOURCES[group].items()
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group,
        "resources": resources,
    }


def _selected(selector: str, kept: Object) -> bool:
    labels = kept["metadata"].get("labels", {})
    wanted = [part.split("=") for part in selector.split(",") if "=" in part and "!=" not in part]
    return all(labels.get(name) == value for name, value in wanted)


@contextmanager
def api_server() -> Iterator[tuple[str, Cluster]]:
    """Its address, and what it keeps."""
    cluster = Cluster()
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", cluster
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
