{{/* Ports of a router's services, of (root, own). Gateways speak HTTP/2 in plain text where they are told so. */}}
{{- define "specdecode.routerPorts" -}}
- name: grpc
  port: {{ int .own.port }}
  targetPort: grpc
  {{- if not .root.Values.tls.enabled }}
  appProtocol: kubernetes.io/h2c
  {{- end }}
{{- if .own.http.enabled }}
- name: http
  port: {{ int .own.http.port }}
  targetPort: http
  appProtocol: {{ ternary "https" "http" .root.Values.tls.enabled }}
{{- end }}
{{- end -}}

{{/* A headless service of (root, model, role, own, name): routers see every replica. */}}
{{- define "specdecode.headless" }}
apiVersion: v1
kind: Service
metadata:
  {{- include "specdecode.metadata" . | nindent 2 }}
spec:
  clusterIP: None
  selector:
    {{- include "specdecode.selector" . | nindent 4 }}
  ports:
    - name: grpc
      port: {{ int .own.port }}
      targetPort: grpc
{{- end }}

{{/* A PodDisruptionBudget of (root, model, role, own, name). */}}
{{- define "specdecode.pdb" }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "specdecode.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ int .own.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "specdecode.selector" . | nindent 6 }}
{{- end }}

{{/* Host name of a model: the host itself where there is one model, else <model>.<host>. */}}
{{- define "specdecode.hostname" -}}
{{- if gt (len .root.Values.models) 1 -}}{{ .model.name }}.{{ .host }}{{- else -}}{{ .host }}{{- end -}}
{{- end -}}
