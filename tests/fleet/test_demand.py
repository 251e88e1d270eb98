"""What a replica needs of a cluster, and how it is said when the cluster has none of it."""

from __future__ import annotations

import pytest

from target_service.cluster import Demand, Node

H100S = Node("a", {"CPU": 8, "GPU": 2, "accelerator_type:H100": 1}, {"zone": "x"})
CPUS = Node("b", {"CPU": 4}, {"zone": "y"})


@pytest.mark.parametrize(
    ("demand", "bundle"),
    [
        pytest.param(Demand(), {"CPU": 1}, id="cpu"),
        pytest.param(Demand(gpus=0.25, cores=0), {"GPU": 0.25}, id="share of a gpu"),
        pytest.param(
            Demand(gpus=1, accelerator="H100"),
            {"CPU": 1, "GPU": 1, "accelerator_type:H100": 0.001},
            id="h100",
        ),
        pytest.param(Demand(accelerator="H100"), {"CPU": 1}, id="no gpu, no kind of it"),
        pytest.param(Demand(cores=0), {"CPU": 0.001}, id="never nothing"),
    ],
)
def test_a_rank_reserves_what_it_uses(demand: Demand, bundle: dict[str, float]) -> None:
    assert demand.bundle == bundle


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        pytest.param(
            Demand(gpus=1, accelerator="H200"), "enough accelerator_type:H200 (most on one node: 0)"
        ),
        pytest.param(Demand(2, gpus=2), "enough GPU (most on one node: 2)"),
        pytest.param(Demand(cores=9), "enough CPU (most on one node: 8)"),
        pytest.param(Demand(labels={"zone": "z"}), "no node of the cluster has label zone=z"),
        pytest.param(Demand(gpus=1, labels={"zone": "y"}), "enough GPU"),
        pytest.param(Demand(2, gpus=1), "2 CPU, 2 GPU is there, but taken"),
    ],
)
def test_what_is_missing_is_named(demand: Demand, reason: str) -> None:
    assert reason in demand.unmet([H100S, CPUS])
