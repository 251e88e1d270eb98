"""Every object is what the API server takes, in every version of Kubernetes that the chart names."""

from __future__ import annotations

import copy
import json

import pytest

pytest.importorskip("kubernetes_validate", reason="make test-deploy brings the schemas")

from tests.deploy.cases import CASES
from tests.deploy.chart import Object
from tests.deploy.schemas import CRDS_VARIABLE, custom_problems, is_custom, problems

pytestmark = pytest.mark.usefixtures("real_helm")

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")


def all_objects() -> list[Object]:
    """Those of all cases, equal ones once."""
    found = {json.dumps(made, sort_keys=True): made for case in CASES for made in case.objects}
    return list(found.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(version: str) -> None:
    known = [made for made in all_objects() if not is_custom(made)]
    assert {"StatefulSet", "HorizontalPodAutoscaler", "NetworkPolicy"} <= {made["kind"] for made in known}
    assert [problem for made in known for problem in problems(made, version)] == []


def test_a_misspelt_field_would_be_noticed() -> None:
    (made,) = [m for m in CASES[0].objects if m["kind"] == "StatefulSet"]
    broken = copy.deepcopy(made)
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    assert any("livenessProb" in problem for problem in problems(broken, VERSIONS[-1]))


def test_operators_take_every_object_whose_definition_is_here() -> None:
    custom = [made for made in all_objects() if is_custom(made)]
    assert {"RayCluster", "Certificate", "ScaledObject", "GRPCRoute"} <= {made["kind"] for made in custom}
    found = {made["kind"]: custom_problems(made) for made in custom}
    if all(problem is None for problem in found.values()):
        pytest.skip(f"no definitions of custom kinds; name a folder by {CRDS_VARIABLE}")
    assert [problem for made in custom for problem in custom_problems(made) or ()] == []


def test_a_misspelt_field_of_a_custom_kind_would_be_noticed() -> None:
    checked = [made for made in all_objects() if is_custom(made) and custom_problems(made) is not None]
    if not checked:
        pytest.skip(f"no definitions of custom kinds; name a folder by {CRDS_VARIABLE}")
    for made in checked:
        broken = {**made, "spec": {**made["spec"], "misspelt": 1}}
        assert any("misspelt" in problem for problem in custom_problems(broken) or ()), made["kind"]
