{{/* What another template renders, as JSON: a list of its name and its argument. What is no YAML fails instead of being rendered. */}}
{{- define "noetl.map" -}}
{{- $parsed := include (first .) (last .) | fromYaml }}
{{- $error := get $parsed "Error" }}
{{- if and (kindIs "string" $error) (hasPrefix "error " $error) }}{{ include "noetl.unreadable" (list (first .) $error) }}{{ end }}
{{- toJson $parsed }}
{{- end -}}

{{- define "noetl.list" -}}
{{- $name := first . }}
{{- $parsed := include $name (last .) | fromYamlArray | default list }}
{{- with $parsed }}
{{- $error := first . }}
{{- if and (kindIs "string" $error) (hasPrefix "error " $error) }}{{ include "noetl.unreadable" (list $name $error) }}{{ end }}
{{- end }}
{{- toJson $parsed }}
{{- end -}}

{{- define "noetl.unreadable" -}}
{{- fail (printf "%s is no YAML; look for strange characters in values: %s" (first .) (last .)) }}
{{- end -}}

{{- define "noetl.alerts" -}}
{{- .Files.Get "files/alerts.yaml" | replace "$namespace" .Release.Namespace | replace "$release" (include "noetl.fullname" .) }}
{{- end -}}
