{{/* What a component connects to: components, and outside services by the name of their value in networkPolicy. */}}
{{- define "noetl.reached" -}}
{{- $names := list }}
{{- range .component.reaches }}
{{- if and (eq . "objects") $.root.Values.minio.enabled }}{{ $names = append $names "minio" }}{{ end }}
{{- $names = append $names . }}
{{- end }}
{{- toYaml $names }}
{{- end -}}

{{- define "noetl.policyPorts" -}}
{{- range . }}
- {protocol: TCP, port: {{ int . }}}
{{- end }}
{{- end -}}

{{/* The code locations of others, as an outside service; nothing without any. */}}
{{- define "noetl.locations" -}}
{{- with .Values.dagster.extraLocations }}
cidrs: {{ toJson $.Values.networkPolicy.locations.cidrs }}
except: {{ toJson $.Values.networkPolicy.locations.except }}
ports:
  {{- range . }}
  - {{ int .port }}
  {{- end }}
{{- end }}
{{- end -}}
