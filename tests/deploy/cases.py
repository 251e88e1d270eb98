"""Values that the chart is rendered with: each file that comes with it, and options alone and together."""

from __future__ import annotations

from collections.abc import Sequence

from tests.deploy.chart import Case, Values, merge

DEMO = ("values-cpu-demo.yaml",)
H100 = ("values-h100-70b.yaml",)
PRODUCTION = ("values-h100-70b.yaml", "values-production.yaml")

GPU: Values = {"target": {"gpu": {"enabled": True}}}
TELEMETRY: Values = {"telemetry": {"otlpEndpoint": "collector.monitoring:4317", "metrics": {"enabled": True}}}
TLS: Values = {
    "tls": {
        "enabled": True,
        "secrets": {"router": "router-tls", "target": "target-tls", "draft": "draft-tls"},
    }
}
CERT_MANAGER: Values = {
    "tls": {"enabled": True, "certManager": {"enabled": True, "issuer": {"name": "ca"}}},
}
KEYS: Values = {"apiKeys": {"enabled": True, "secretName": "keys"}}
KEDA: Values = {"target": {"keda": {"enabled": True, "serverAddress": "http://prometheus:9090"}}}
RAY: Values = {"engine": {"mode": "ray"}}
TWO: Values = {
    "models": [
        {
            "name": "large",
            "target": {
                "model": "org/large",
                "replicas": 2,
                "tensorParallelSize": 2,
                "gpu": {"enabled": True},
            },
            "draft": {"model": "org/small"},
        },
        {"name": "small", "target": {"model": "org/small"}, "draft": {"enabled": False}},
    ]
}
GATEWAY: Values = {
    "gateway": {
        "enabled": True,
        "parentRefs": [{"name": "public"}],
        "grpcHostnames": ["grpc.example.org"],
        "httpHostnames": ["llm.example.org"],
    }
}
INGRESS: Values = {"ingress": {"enabled": True, "className": "nginx", "host": "llm.example.org"}}
MONITORING: Values = merge(
    TELEMETRY,
    {
        "telemetry": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True},
            "dashboards": {"enabled": True},
        }
    },
)
PLACED: Values = {
    role: {
        "nodeSelector": {"pool": role},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "env": [{"name": "OMP_NUM_THREADS", "value": "2"}],
        "podLabels": {"team": "ml"},
        "podAnnotations": {"note": "x"},
    }
    for role in ("router", "target", "draft")
}

CASES: Sequence[Case] = (
    Case("cpu-demo"),
    Case("h100-70b", H100),
    Case("production", PRODUCTION),
    Case("replicas", DEMO, {"router": {"replicas": 3}, "target": {"replicas": 4}, "draft": {"replicas": 2}}),
    Case("hpa-cpu", DEMO, {"router": {"autoscaling": {"enabled": True}}}),
    Case(
        "hpa-custom",
        DEMO,
        {
            "router": {
                "autoscaling": {
                    "enabled": True,
                    "targetCPUPercent": 0,
                    "metrics": [
                        {
                            "type": "Pods",
                            "pods": {
                                "metric": {"name": "specdecode_requests"},
                                "target": {"type": "AverageValue", "averageValue": "50"},
                            },
                        }
                    ],
                    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 60}},
                }
            }
        },
    ),
    Case("no-draft", DEMO, {"draft": {"enabled": False}}),
    Case("ngram-draft", DEMO, {"models": [{"name": "a", "target": {"model": "org/a"}}]}),
    Case("two-models", DEMO, TWO),
    Case("no-http", DEMO, {"router": {"http": {"enabled": False}}}),
    Case("dns", DEMO, {"target": {"discovery": "dns", "replicas": 3}}),
    Case("gpu", DEMO, GPU),
    Case("gpu-product", DEMO, {"target": {"gpu": {"enabled": True, "product": "NVIDIA-H200"}}}),
    Case("tensor-parallel", DEMO, merge(GPU, {"target": {"tensorParallelSize": 8, "attentionHeads": 64}})),
    Case("amd", DEMO, {"target": {"gpu": {"enabled": True, "resource": "amd.com/gpu"}}}),
    Case("draft-gpu", DEMO, {"draft": {"gpu": {"enabled": True}}}),
    Case("host-path", DEMO, {"modelCache": {"type": "hostPath", "download": {"enabled": False}}}),
    Case("claim", DEMO, {"modelCache": {"type": "claim", "storageClassName": "fast"}}),
    Case("existing-claim", DEMO, {"modelCache": {"type": "existingClaim", "existingClaim": "models"}}),
    Case(
        "hub-token",
        DEMO,
        {
            "modelCache": {
                "download": {
                    "tokenSecret": {"name": "hub"},
                    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
                }
            }
        },
    ),
    Case("tls", DEMO, TLS),
    Case("cert-manager", DEMO, CERT_MANAGER),
    Case("api-keys", DEMO, KEYS),
    Case("telemetry", DEMO, TELEMETRY),
    Case("monitoring", DEMO, MONITORING),
    Case("keda", DEMO, merge(TELEMETRY, KEDA)),
    Case("gateway", DEMO, GATEWAY),
    Case("gateway-two-models", DEMO, merge(TWO, GATEWAY, INGRESS)),
    Case("ingress-tls", DEMO, merge(INGRESS, {"ingress": {"tlsSecret": "llm", "annotations": {"a": "b"}}})),
    Case("placed", DEMO, PLACED),
    Case("no-policies", DEMO, {"networkPolicy": {"enabled": False}}),
    Case(
        "closed-policies",
        DEMO,
        merge(
            TELEMETRY,
            {"networkPolicy": {"clients": [{"podSelector": {}}], "scrapers": [{"podSelector": {}}]}},
        ),
    ),
    Case("no-pdb", DEMO, {"router": {"pdb": {"enabled": False}}, "target": {"pdb": {"enabled": False}}}),
    Case("accounts", DEMO, {"serviceAccount": {"create": False, "name": "mine"}}),
    Case("names", DEMO, {"fullnameOverride": "a-name-that-is-longer-than-what-fits-into-names"}),
    Case("labels", DEMO, {"commonLabels": {"team": "ml"}, "commonAnnotations": {"owner": "ml"}}),
    Case(
        "images",
        DEMO,
        {
            "image": {
                "repository": "registry.example.org/specdecode",
                "tag": "1.2.3",
                "digests": {"cuda": f"sha256:{'0' * 64}"},
                "pullPolicy": "Always",
                "pullSecrets": ["registry"],
            }
        },
    ),
    Case("load-balancer", DEMO, {"router": {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}}}),
    Case(
        "extra",
        DEMO,
        {
            "extraObjects": [
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}},
                "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: more",
            ]
        },
    ),
    Case("settings", DEMO, {"router": {"settings": {"num_draft_tokens": 4, "estimates_path": "none"}}}),
    Case("no-test-pod", DEMO, {"tests": {"enabled": False}}),
    Case("ray", DEMO, RAY),
    Case("ray-h100", H100, merge(RAY, {"engine": {"ray": {"acceleratorType": "H100"}}})),
    Case("ray-telemetry", DEMO, merge(RAY, TELEMETRY, PLACED)),
    Case("ray-tls", DEMO, merge(RAY, CERT_MANAGER)),
    Case("ray-two-models", DEMO, merge(RAY, TWO)),
    Case(
        "everything", PRODUCTION, merge(INGRESS, MONITORING, PLACED, KEDA, {"modelCache": {"type": "claim"}})
    ),
)
