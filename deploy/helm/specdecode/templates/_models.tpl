{{/*
The models that are served, checked and with the defaults filled in, as YAML `models: [...]`.
Each has name, full (the start of its objects' names), router, target and draft.
*/}}
{{- define "specdecode.models" -}}
{{- $root := . -}}
{{- $models := list -}}
{{- range $index, $entry := .Values.models -}}
  {{- $model := dict "name" $entry.name "full" (printf "%s-%s" (include "specdecode.fullname" $root) $entry.name) -}}
  {{- range $role := list "router" "target" "draft" -}}
    {{- $defaults := deepCopy (get $root.Values $role) -}}
    {{- $_ := set $model $role (mergeOverwrite $defaults (default dict (get $entry $role))) -}}
  {{- end -}}
  {{- if $model.target.keda.enabled -}}{{- $_ := set $model.target "discovery" "dns" -}}{{- end -}}
  {{- $models = append $models $model -}}
{{- end -}}
{{- include "specdecode.checkRelease" . -}}
{{- range $models -}}{{- include "specdecode.checkModel" (dict "root" $root "model" .) -}}{{- end -}}
{{- dict "models" $models | toYaml -}}
{{- end -}}

{{/* Refuses, with a sentence that says what to set, what the schema can't see. */}}
{{- define "specdecode.checkRelease" -}}
{{- $values := .Values -}}
{{- if not $values.models -}}
  {{- fail "models: no model is served; set at least one, as in models: [{name: demo, target: {model: smollm2-135m-instruct}}], or install with -f values-cpu-demo.yaml" -}}
{{- end -}}
{{- $names := list -}}
{{- range $values.models -}}{{- $names = append $names .name -}}{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
  {{- fail (printf "models: two entries have one name; give each of %s a name of its own" (join ", " $names)) -}}
{{- end -}}
{{- if $values.tls.enabled -}}
  {{- range $role := list "router" "target" "draft" -}}
    {{- if and (not $values.tls.certManager.enabled) (not (get $values.tls.secrets $role)) -}}
      {{- fail (printf "tls.secrets.%s: TLS needs a secret with tls.crt, tls.key and ca.crt; name one, or set tls.certManager.enabled and tls.certManager.issuer.name" $role) -}}
    {{- end -}}
  {{- end -}}
  {{- if and $values.tls.certManager.enabled (not $values.tls.certManager.issuer.name) -}}
    {{- fail "tls.certManager.issuer.name: cert-manager needs an issuer; name an Issuer of this namespace, or set kind to ClusterIssuer" -}}
  {{- end -}}
{{- end -}}
{{- if and $values.apiKeys.enabled (not $values.apiKeys.secretName) -}}
  {{- fail "apiKeys.secretName: clients are asked for keys, but no secret has them; name the secret with the file of keys" -}}
{{- end -}}
{{- if and (eq $values.modelCache.type "existingClaim") (not $values.modelCache.existingClaim) -}}
  {{- fail "modelCache.existingClaim: name the claim, or set modelCache.type to claim to have one made" -}}
{{- end -}}
{{- if and (not $values.serviceAccount.create) (not $values.serviceAccount.name) -}}
  {{- fail "serviceAccount.name: name an existing service account, or set serviceAccount.create" -}}
{{- end -}}
{{- if and $values.telemetry.serviceMonitor.enabled (not $values.telemetry.metrics.enabled) -}}
  {{- fail "telemetry.serviceMonitor.enabled: there is nothing to scrape; set telemetry.metrics.enabled" -}}
{{- end -}}
{{- if and $values.gateway.enabled (not $values.gateway.parentRefs) -}}
  {{- fail "gateway.parentRefs: routes need a Gateway; name one, as in parentRefs: [{name: public}]" -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.host) -}}
  {{- fail "ingress.host: an Ingress needs a host name; set one" -}}
{{- end -}}
{{- end -}}

{{- define "specdecode.checkModel" -}}
{{- $name := .model.name -}}
{{- $target := .model.target -}}
{{- $draft := .model.draft -}}
{{- $router := .model.router -}}
{{- if not $target.model -}}
  {{- fail (printf "models[%s].target.model: no model; set a known name, a directory of the model cache or a hub id" $name) -}}
{{- end -}}
{{- if and (gt (int $target.tensorParallelSize) 1) (not $target.gpu.enabled) -}}
  {{- fail (printf "models[%s].target.tensorParallelSize: %d GPUs share the model, but gpu.enabled is false; set target.gpu.enabled, or 1" $name (int $target.tensorParallelSize)) -}}
{{- end -}}
{{- if and $target.attentionHeads (ne 0 (mod (int $target.attentionHeads) (int $target.tensorParallelSize))) -}}
  {{- fail (printf "models[%s].target.tensorParallelSize: %d does not divide the model's %d attention heads; set one of the divisors" $name (int $target.tensorParallelSize) (int $target.attentionHeads)) -}}
{{- end -}}
{{- if and $router.autoscaling.enabled (not $router.autoscaling.targetCPUPercent) (not $router.autoscaling.metrics) -}}
  {{- fail (printf "models[%s].router.autoscaling: nothing to scale on; set targetCPUPercent or metrics" $name) -}}
{{- end -}}
{{- if and $router.autoscaling.enabled (gt (int $router.autoscaling.minReplicas) (int $router.autoscaling.maxReplicas)) -}}
  {{- fail (printf "models[%s].router.autoscaling: minReplicas %d is above maxReplicas %d" $name (int $router.autoscaling.minReplicas) (int $router.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and $target.keda.enabled (not $target.keda.serverAddress) -}}
  {{- fail (printf "models[%s].target.keda.serverAddress: KEDA asks Prometheus for price and queue; set its address, as in http://prometheus:9090" $name) -}}
{{- end -}}
{{- if and $target.keda.enabled (eq .root.Values.engine.mode "ray") -}}
  {{- fail (printf "models[%s].target.keda.enabled: KEDA scales StatefulSets; set engine.mode to standalone" $name) -}}
{{- end -}}
{{- if and $target.keda.enabled (not .root.Values.telemetry.metrics.enabled) -}}
  {{- fail (printf "models[%s].target.keda.enabled: price and queue are metrics; set telemetry.metrics.enabled" $name) -}}
{{- end -}}
{{- if and $target.keda.enabled (gt (int $target.keda.minReplicas) (int $target.keda.maxReplicas)) -}}
  {{- fail (printf "models[%s].target.keda: minReplicas %d is above maxReplicas %d" $name (int $target.keda.minReplicas) (int $target.keda.maxReplicas)) -}}
{{- end -}}
{{- if and .root.Values.gateway.enabled (not $router.http.enabled) .root.Values.gateway.httpHostnames -}}
  {{- fail (printf "models[%s].router.http.enabled: gateway.httpHostnames wants the HTTP API; enable it, or remove the names" $name) -}}
{{- end -}}
{{- if and .root.Values.ingress.enabled (not $router.http.enabled) -}}
  {{- fail (printf "models[%s].router.http.enabled: the Ingress leads to the HTTP API; enable it, or switch ingress.enabled off" $name) -}}
{{- end -}}
{{- if and (eq .root.Values.modelCache.type "emptyDir") (not .root.Values.modelCache.download.enabled) -}}
  {{- fail "modelCache.download.enabled: an emptyDir is empty until models are fetched into it; enable the download, or choose another modelCache.type" -}}
{{- end -}}
{{- end -}}
