{{/* Pods of a RayCluster. */}}

{{- define "specdecode.rayMetadata" -}}
labels:
  {{- include "specdecode.selector" . | nindent 2 }}
  {{- include "specdecode.commonLabels" .root | nindent 2 }}
  {{- with .own.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include "specdecode.config.target" . | sha256sum }}
  {{- with .own.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Actors find the drafts' and targets' file by this variable, too. */}}
{{- define "specdecode.rayEnvironment" -}}
{{ include "specdecode.serviceEnvironment" . }}
- name: SPECDECODE_CONFIG
  value: /etc/specdecode/specdecode.yaml
- name: RAY_AUTH_MODE
  value: disabled
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- end -}}

{{/* The port of Ray's own process answers: (port, seconds). The operator's probes need tools that no image of ours has. */}}
{{- define "specdecode.rayProbes" -}}
startupProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 5
  failureThreshold: {{ max 1 (div (add (int .seconds) 4) 5) }}
readinessProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 5
livenessProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 10
  failureThreshold: 6
{{- end -}}
