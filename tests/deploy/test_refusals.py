"""What can't work is refused before anything is installed, with a sentence that says what to set."""

from __future__ import annotations

import pytest

from tests.deploy.cases import DEMO, INGRESS, KEDA, TELEMETRY, merge
from tests.deploy.chart import Values, refusal

pytestmark = pytest.mark.usefixtures("real_helm")

SENTENCES: dict[str, tuple[Values, str]] = {
    "no model": (
        {"models": []},
        "models: no model is served; set at least one, as in models: [{name: demo, "
        "target: {model: smollm2-135m-instruct}}], or install with -f values-cpu-demo.yaml",
    ),
    "a model without a target": (
        {"models": [{"name": "a"}]},
        "models[a].target.model: no model; set a known name, a directory of the model cache or a hub id",
    ),
    "two models of one name": (
        {"models": [{"name": "a", "target": {"model": "x"}}, {"name": "a", "target": {"model": "y"}}]},
        "models: two entries have one name; give each of a, a a name of its own",
    ),
    "ranks that do not divide the heads": (
        {"target": {"gpu": {"enabled": True}, "tensorParallelSize": 4, "attentionHeads": 30}},
        "models[demo].target.tensorParallelSize: 4 does not divide the model's 30 attention heads; "
        "set one of the divisors",
    ),
    "ranks without GPUs": (
        {"target": {"tensorParallelSize": 2}},
        "models[demo].target.tensorParallelSize: 2 GPUs share the model, but gpu.enabled is false; "
        "set target.gpu.enabled, or 1",
    ),
    "TLS without a secret": (
        {"tls": {"enabled": True, "secrets": {"router": "r"}}},
        "tls.secrets.target: TLS needs a secret with tls.crt, tls.key and ca.crt; name one, or set "
        "tls.certManager.enabled and tls.certManager.issuer.name",
    ),
    "cert-manager without an issuer": (
        {"tls": {"enabled": True, "certManager": {"enabled": True}}},
        "tls.certManager.issuer.name: cert-manager needs an issuer; name an Issuer of this namespace, "
        "or set kind to ClusterIssuer",
    ),
    "keys without a secret": (
        {"apiKeys": {"enabled": True}},
        "apiKeys.secretName: clients are asked for keys, but no secret has them; name the secret with "
        "the file of keys",
    ),
    "scaling on nothing": (
        {"router": {"autoscaling": {"enabled": True, "targetCPUPercent": 0}}},
        "models[demo].router.autoscaling: nothing to scale on; set targetCPUPercent or metrics",
    ),
    "fewest routers above most": (
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
        "models[demo].router.autoscaling: minReplicas 9 is above maxReplicas 8",
    ),
    "KEDA without Prometheus": (
        {"target": {"keda": {"enabled": True}}},
        "models[demo].target.keda.serverAddress: KEDA asks Prometheus for price and queue; set its "
        "address, as in http://prometheus:9090",
    ),
    "KEDA without metrics": (
        KEDA,
        "models[demo].target.keda.enabled: price and queue are metrics; set telemetry.metrics.enabled",
    ),
    "KEDA beside Ray": (
        merge(TELEMETRY, KEDA, {"engine": {"mode": "ray"}}),
        "models[demo].target.keda.enabled: KEDA scales StatefulSets; set engine.mode to standalone",
    ),
    "scraping without metrics": (
        {"telemetry": {"serviceMonitor": {"enabled": True}}},
        "telemetry.serviceMonitor.enabled: there is nothing to scrape; set telemetry.metrics.enabled",
    ),
    "routes without a Gateway": (
        {"gateway": {"enabled": True}},
        "gateway.parentRefs: routes need a Gateway; name one, as in parentRefs: [{name: public}]",
    ),
    "an Ingress without a host": (
        {"ingress": {"enabled": True}},
        "ingress.host: an Ingress needs a host name; set one",
    ),
    "an Ingress to nothing": (
        merge(INGRESS, {"router": {"http": {"enabled": False}}}),
        "models[demo].router.http.enabled: the Ingress leads to the HTTP API; enable it, or switch "
        "ingress.enabled off",
    ),
    "a claim without a name": (
        {"modelCache": {"type": "existingClaim"}},
        "modelCache.existingClaim: name the claim, or set modelCache.type to claim to have one made",
    ),
    "an empty cache that nobody fills": (
        {"modelCache": {"download": {"enabled": False}}},
        "modelCache.download.enabled: an emptyDir is empty until models are fetched into it; enable the "
        "download, or choose another modelCache.type",
    ),
    "no service account": (
        {"serviceAccount": {"create": False}},
        "serviceAccount.name: name an existing service account, or set serviceAccount.create",
    ),
}

SCHEMA: dict[str, tuple[Values, str]] = {
    "an unknown value": ({"replicaCount": 2}, "at '': additional properties 'replicaCount' not allowed"),
    "an unknown value of a role": (
        {"target": {"replica": 2}},
        "at '/target': additional properties 'replica' not allowed",
    ),
    "an unknown value of a model": (
        {"models": [{"name": "a", "targets": {}}]},
        "at '/models/0': additional properties 'targets' not allowed",
    ),
    "an unknown option of a service": (
        {"target": {"settings": {"max_runing": 8}}},
        "at '/target/settings': additional properties 'max_runing' not allowed",
    ),
    "an option out of range": (
        {"target": {"settings": {"max_running": 0}}},
        "at '/target/settings/max_running': minimum: got 0, want 1",
    ),
    "an option that a value of the chart sets": (
        {"router": {"settings": {"targets": "a:1"}}},
        "at '/router/settings': additional properties 'targets' not allowed",
    ),
    "no replicas": ({"router": {"replicas": 0}}, "at '/router/replicas': minimum: got 0, want 1"),
    "no replicas of a model": (
        {"models": [{"name": "a", "target": {"model": "x", "replicas": 0}}]},
        "at '/models/0/target/replicas': minimum: got 0, want 1",
    ),
    "a mode that is none": (
        {"engine": {"mode": "slurm"}},
        "at '/engine/mode': value must be one of 'standalone', 'ray'",
    ),
    "a name that is no label": (
        {"models": [{"name": "My_Model"}]},
        "at '/models/0/name': 'My_Model' does not match pattern",
    ),
    "root": (
        {"securityContext": {"runAsUser": 0}},
        "at '/securityContext/runAsUser': minimum: got 0, want 1",
    ),
    "a drain that no service allows": (
        {"target": {"drainSeconds": 7200}},
        "at '/target/drainSeconds': maximum: got 7,200, want 3,600",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_refused_with_a_sentence(name: str) -> None:
    values, sentence = SENTENCES[name]
    assert sentence in refusal(values, *DEMO)


@pytest.mark.parametrize("name", SCHEMA)
def test_refused_by_the_schema(name: str) -> None:
    values, message = SCHEMA[name]
    assert message in refusal(values, *DEMO)


def test_the_chart_alone_says_what_to_set() -> None:
    assert "models: no model is served; set at least one" in refusal({})
