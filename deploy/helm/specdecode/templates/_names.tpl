{{/* Names and labels. */}}

{{- define "specdecode.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "specdecode.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 24 | trimSuffix "-" -}}
{{- else if contains (include "specdecode.name" .) .Release.Name -}}
{{- .Release.Name | trunc 24 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "specdecode.name" .) | trunc 24 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What a selector selects by, of (root, model, role). */}}
{{- define "specdecode.selector" -}}
app.kubernetes.io/name: {{ include "specdecode.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
specdecode.io/model: {{ .model.name }}
{{- end -}}

{{/* Labels that any object has. */}}
{{- define "specdecode.commonLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: specdecode
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata of an object that belongs to a role of a model: (root, model, role, name, labels, annotations). */}}
{{- define "specdecode.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "specdecode.selector" . | nindent 2 }}
  {{- include "specdecode.commonLabels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* metadata of an object that belongs to the release alone: (root, name, component, labels, annotations). */}}
{{- define "specdecode.releaseMetadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  app.kubernetes.io/name: {{ include "specdecode.name" .root }}
  app.kubernetes.io/instance: {{ .root.Release.Name }}
  app.kubernetes.io/component: {{ .component }}
  {{- include "specdecode.commonLabels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Service account of a role. */}}
{{- define "specdecode.serviceAccount" -}}
{{- if .root.Values.serviceAccount.create -}}
{{- printf "%s-%s" (include "specdecode.fullname" .root) .role -}}
{{- else -}}
{{- default "default" .root.Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Image for (root, cuda). */}}
{{- define "specdecode.image" -}}
{{- $image := .root.Values.image -}}
{{- $kind := ternary "cuda" "cpu" .cuda -}}
{{- with get $image.digests $kind -}}
{{- printf "%s@%s" $image.repository . -}}
{{- else -}}
{{- printf "%s:%s-%s" $image.repository (default .root.Chart.AppVersion $image.tag) $kind -}}
{{- end -}}
{{- end -}}

{{/* Secret with the certificate of a role of a model. */}}
{{- define "specdecode.certificate" -}}
{{- default (printf "%s-%s-tls" .model.full .role) (get .root.Values.tls.secrets .role) -}}
{{- end -}}
