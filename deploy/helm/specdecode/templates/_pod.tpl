{{/* Pods of all roles. Every definition takes (root, model, role, own), own being the role's values. */}}

{{- define "specdecode.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "specdecode.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int .Values.securityContext.runAsUser }}
  runAsGroup: {{ int .Values.securityContext.runAsGroup }}
  fsGroup: {{ int .Values.securityContext.runAsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "specdecode.gpus" -}}
{{- if eq .role "router" -}}0
{{- else if not .own.gpu.enabled -}}0
{{- else -}}{{ int (default 1 .own.tensorParallelSize) }}
{{- end -}}
{{- end -}}

{{- define "specdecode.resources" -}}
{{- $resources := deepCopy .own.resources -}}
{{- $gpus := int (include "specdecode.gpus" .) -}}
{{- if $gpus -}}
{{- $_ := set $resources "limits" (set (default dict $resources.limits) .own.gpu.resource $gpus) -}}
{{- $_ := set $resources "requests" (set (default dict $resources.requests) .own.gpu.resource $gpus) -}}
{{- end -}}
resources:
  {{- toYaml $resources | nindent 2 }}
{{- end -}}

{{- define "specdecode.environment" -}}
- name: SPECDECODE_CACHE
  value: /var/cache/specdecode
- name: HF_HOME
  value: /var/cache/specdecode/hub
- name: HOME
  value: /tmp
{{- end -}}

{{/* Models are fetched before; a service that serves needs neither hub nor token. */}}
{{- define "specdecode.serviceEnvironment" -}}
{{ include "specdecode.environment" . }}
{{- if .root.Values.modelCache.download.enabled }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with .own.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "specdecode.ports" -}}
- name: grpc
  containerPort: {{ int .own.port }}
{{- if and (eq .role "router") .own.http.enabled }}
- name: http
  containerPort: {{ int .own.http.port }}
{{- end }}
{{- if .root.Values.telemetry.metrics.enabled }}
- name: metrics
  containerPort: {{ int .root.Values.telemetry.metrics.port }}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: health
  containerPort: {{ int .root.Values.tls.healthPort }}
{{- end }}
{{- end -}}

{{/*
Models load and calibrate before the port listens. A router listens at once, so its start and its life are told
by the health service named liveness: without a target it is not ready, but nothing is gained by a restart.
*/}}
{{- define "specdecode.probes" -}}
{{- $port := int (ternary .root.Values.tls.healthPort .own.port .root.Values.tls.enabled) -}}
startupProbe:
  grpc: {port: {{ $port }}, service: liveness}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (add (int .own.startupSeconds) 4) 5) }}
readinessProbe:
  grpc: {port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  grpc: {port: {{ $port }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end -}}

{{- define "specdecode.mounts" -}}
- {name: config, mountPath: /etc/specdecode, readOnly: true}
- {name: cache, mountPath: /var/cache/specdecode}
- {name: tmp, mountPath: /tmp}
{{- if ne .role "router" }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/specdecode/tls, readOnly: true}
{{- end }}
{{- if and (eq .role "router") .root.Values.apiKeys.enabled }}
- {name: keys, mountPath: /etc/specdecode/keys, readOnly: true}
{{- end }}
{{- end -}}

{{- define "specdecode.cacheVolume" -}}
{{- $cache := .root.Values.modelCache -}}
- name: cache
{{- if eq $cache.type "hostPath" }}
  hostPath: {path: {{ $cache.hostPath }}, type: DirectoryOrCreate}
{{- else if eq $cache.type "claim" }}
  persistentVolumeClaim: {claimName: {{ include "specdecode.fullname" .root }}-models}
{{- else if eq $cache.type "existingClaim" }}
  persistentVolumeClaim: {claimName: {{ $cache.existingClaim }}}
{{- else }}
  emptyDir: {sizeLimit: {{ $cache.size }}}
{{- end }}
{{- end -}}

{{- define "specdecode.volumes" -}}
- name: config
  configMap:
    name: {{ .model.full }}-{{ .role }}
{{ include "specdecode.cacheVolume" . }}
- name: tmp
  emptyDir: {}
{{- if ne .role "router" }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .own.sharedMemory }}}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "specdecode.certificate" . }}, defaultMode: 0440}
{{- end }}
{{- if and (eq .role "router") .root.Values.apiKeys.enabled }}
- name: keys
  secret: {secretName: {{ .root.Values.apiKeys.secretName }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Fetches the model of the role; "" for a draft service that only looks up. */}}
{{- define "specdecode.download" -}}
{{- $download := .root.Values.modelCache.download -}}
{{- $model := ternary .model.draft.model .model.target.model (eq .role "draft") -}}
{{- if and $download.enabled $model -}}
initContainers:
  - name: fetch
    image: {{ include "specdecode.image" (dict "root" .root "cuda" (ne "0" (include "specdecode.gpus" .))) }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [python, -m, specdecode.cli, models, fetch, {{ $model | quote }}]
    env:
      {{- include "specdecode.environment" . | nindent 6 }}
      {{- with $download.tokenSecret.name }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ . }}, key: {{ $download.tokenSecret.key }}}
      {{- end }}
      {{- with $download.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- include "specdecode.containerSecurity" . | nindent 4 }}
    resources:
      {{- toYaml $download.resources | nindent 6 }}
    volumeMounts:
      - {name: cache, mountPath: /var/cache/specdecode}
      - {name: tmp, mountPath: /tmp}
{{- end -}}
{{- end -}}

{{- define "specdecode.spread" -}}
{{- with .own.topologySpreadConstraints -}}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- else -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "specdecode.selector" . | nindent 8 }}
{{- end -}}
{{- end -}}

{{- define "specdecode.placement" -}}
{{- $nodes := deepCopy .own.nodeSelector -}}
{{- if ne .role "router" -}}
{{- if and .own.gpu.enabled .own.gpu.product -}}
{{- $_ := set $nodes "nvidia.com/gpu.product" .own.gpu.product -}}
{{- end -}}
{{- end -}}
{{- with $nodes }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* What a pod has whatever runs in it. */}}
{{- define "specdecode.podBase" -}}
serviceAccountName: {{ include "specdecode.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{ include "specdecode.podSecurity" .root }}
{{- end -}}

{{- define "specdecode.podMetadata" -}}
labels:
  {{- include "specdecode.selector" . | nindent 2 }}
  {{- include "specdecode.commonLabels" .root | nindent 2 }}
  {{- with .own.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include (printf "specdecode.config.%s" .role) . | sha256sum }}
  {{- with .own.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* template of a Deployment or StatefulSet, also with module: what `python -m` runs. */}}
{{- define "specdecode.podTemplate" -}}
metadata:
  {{- include "specdecode.podMetadata" . | nindent 2 }}
spec:
  {{- include "specdecode.podBase" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ add (int .own.preStopSeconds) (int .own.drainSeconds) 15 }}
  {{- include "specdecode.placement" . | nindent 2 }}
  {{- include "specdecode.spread" . | nindent 2 }}
  {{- include "specdecode.download" . | nindent 2 }}
  containers:
    - name: {{ .role }}
      image: {{ include "specdecode.image" (dict "root" .root "cuda" (ne "0" (include "specdecode.gpus" .))) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: [python, -m, {{ .module }}, --config, /etc/specdecode/specdecode.yaml]
      env:
        {{- include "specdecode.serviceEnvironment" . | nindent 8 }}
      ports:
        {{- include "specdecode.ports" . | nindent 8 }}
      {{- include "specdecode.probes" . | nindent 6 }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ int .own.preStopSeconds }}}
      {{- include "specdecode.containerSecurity" . | nindent 6 }}
      {{- include "specdecode.resources" . | nindent 6 }}
      volumeMounts:
        {{- include "specdecode.mounts" . | nindent 8 }}
  volumes:
    {{- include "specdecode.volumes" . | nindent 4 }}
{{- end -}}
