{{/* What may reach any pod beside its callers: scrapers, and probes, which come from the node. */}}
{{- define "specdecode.beside" -}}
{{- if .Values.telemetry.metrics.enabled }}
- ports:
    - port: {{ int .Values.telemetry.metrics.port }}
  {{- with .Values.networkPolicy.scrapers }}
  from:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- if .Values.tls.enabled }}
- ports:
    - port: {{ int .Values.tls.healthPort }}
{{- end }}
{{- end -}}

{{/* What any pod may reach: names, the hub, the collector. */}}
{{- define "specdecode.egress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
  {{- with .Values.networkPolicy.dns }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- if .Values.modelCache.download.enabled }}
- ports:
    - port: 443
  {{- with .Values.networkPolicy.downloads }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- with .Values.telemetry.otlpEndpoint }}
- ports:
    - port: {{ regexFind "[0-9]+$" . | int }}
  {{- with $.Values.networkPolicy.collector }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
