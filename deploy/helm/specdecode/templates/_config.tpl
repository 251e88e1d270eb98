{{/* The services' file: one section for each role, of (root, model). Keys are options of specdecode/config.py. */}}

{{- define "specdecode.config.common" -}}
host: "0.0.0.0"
port: {{ int .own.port }}
drain_seconds: {{ int .own.drainSeconds }}
{{- with .root.Values.telemetry.otlpEndpoint }}
otlp_endpoint: {{ . | quote }}
{{- end }}
{{- if .root.Values.telemetry.metrics.enabled }}
metrics_port: {{ int .root.Values.telemetry.metrics.port }}
{{- end }}
{{- if .root.Values.tls.enabled }}
tls_cert: /etc/specdecode/tls/tls.crt
tls_key: /etc/specdecode/tls/tls.key
health_port: {{ int .root.Values.tls.healthPort }}
{{- end }}
{{- end -}}

{{/* How targets, drafts and registries are called. */}}
{{- define "specdecode.config.identity" -}}
{{- if .root.Values.tls.enabled }}
mesh_ca: /etc/specdecode/tls/ca.crt
mesh_cert: /etc/specdecode/tls/tls.crt
mesh_key: /etc/specdecode/tls/tls.key
mesh_name: {{ .model.full }}-mesh
{{- end }}
{{- end -}}

{{/* What callers of targets and drafts must show; replicas that Ray places call their registry. */}}
{{- define "specdecode.config.mesh" -}}
{{- if .root.Values.tls.enabled }}
tls_client_ca: /etc/specdecode/tls/ca.crt
tls_client_names: [{{ .model.full }}-router{{ if eq .root.Values.engine.mode "ray" }}, {{ .model.full }}-mesh{{ end }}]
{{- end }}
{{- end -}}

{{- define "specdecode.config.router" -}}
{{- $own := .model.router -}}
model: {{ .model.target.model | quote }}
{{ include "specdecode.config.common" (dict "root" .root "own" $own) }}
http_port: {{ if $own.http.enabled }}{{ int $own.http.port }}{{ else }}none{{ end }}
targets:
  {{- include "specdecode.targets" . | nindent 2 }}
{{- if .model.draft.enabled }}
draft: {{ .model.full }}-draft:{{ int .model.draft.port }}
{{- else }}
draft: none
{{- end }}
{{- include "specdecode.config.identity" . }}
{{- if .root.Values.apiKeys.enabled }}
keys_path: /etc/specdecode/keys/{{ .root.Values.apiKeys.key }}
{{- end }}
{{- if not (hasKey $own.settings "estimates_path") }}
estimates_path: /var/cache/specdecode/estimates-{{ .model.full }}.json
{{- end }}
{{- with $own.settings }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Addresses of the target replicas, a list. */}}
{{- define "specdecode.targets" -}}
{{- $target := .model.target -}}
{{- $host := printf "%s-target" .model.full -}}
{{- if eq .root.Values.engine.mode "ray" -}}
- watch://{{ .model.full }}-registry:{{ int $target.port }}
{{- else if eq $target.discovery "dns" -}}
- dns:///{{ $host }}:{{ int $target.port }}
{{- else -}}
{{- range $index := until (int $target.replicas) }}
- {{ $.model.full }}-target-{{ $index }}.{{ $host }}:{{ int $target.port }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdecode.config.target" -}}
{{- $own := .model.target -}}
model: {{ $own.model | quote }}
{{ include "specdecode.config.common" (dict "root" .root "own" $own) }}
device: {{ ternary "cuda" "cpu" $own.gpu.enabled }}
{{- if gt (int $own.tensorParallelSize) 1 }}
tensor_parallel: {{ int $own.tensorParallelSize }}
{{- end }}
{{- include "specdecode.config.mesh" . }}
{{- if eq .root.Values.engine.mode "ray" }}
{{ include "specdecode.config.ray" . }}
{{- end }}
{{- with $own.settings }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What Ray is asked for. */}}
{{- define "specdecode.config.ray" -}}
{{- $own := .model.target -}}
{{- $ray := .root.Values.engine.ray -}}
replicas: {{ int $own.replicas }}
ray_address: 127.0.0.1:6379
gpus_per_rank: {{ ternary 1 0 $own.gpu.enabled }}
cores_per_replica: {{ max 1 (div (int (include "specdecode.cores" $own.resources)) (int $own.tensorParallelSize)) }}
accelerator_type: {{ default "none" $ray.acceleratorType }}
placement_seconds: {{ int $ray.placementSeconds }}
max_restarts: {{ int $ray.maxRestarts }}
{{- include "specdecode.config.identity" . }}
{{- end -}}

{{- define "specdecode.config.draft" -}}
{{- $own := .model.draft -}}
model: {{ default "none" $own.model | quote }}
{{ include "specdecode.config.common" (dict "root" .root "own" $own) }}
device: {{ ternary "cuda" "cpu" $own.gpu.enabled }}
{{- include "specdecode.config.mesh" . }}
{{- with $own.settings }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Whole cores of requested CPU, at least 1. */}}
{{- define "specdecode.cores" -}}
{{- $cpu := toString (default 1 (dig "requests" "cpu" 1 .)) -}}
{{- if hasSuffix "m" $cpu -}}
{{- max 1 (div (int (trimSuffix "m" $cpu)) 1000) -}}
{{- else -}}
{{- max 1 (int (float64 $cpu)) -}}
{{- end -}}
{{- end -}}
