{{- define "noetl.name" -}}
{{- include "noetl.short" (default .Chart.Name .Values.nameOverride) -}}
{{- end -}}

{{- define "noetl.fullname" -}}
{{- $both := contains (include "noetl.name" .) .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name (include "noetl.name" .)) -}}
{{- include "noetl.short" (default $both .Values.fullnameOverride) -}}
{{- end -}}

{{/* 40 characters at most: names of components follow. What is cut off leaves a sum of the whole, so that no other has the same. */}}
{{- define "noetl.short" -}}
{{- if gt (len .) 40 -}}
{{- printf "%s-%s" (. | trunc 33 | trimSuffix "-" | trimSuffix ".") (sha256sum . | trunc 6) -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- define "noetl.image" -}}
{{- include "noetl.imageOf" (list . .Values.image "") -}}
{{- end -}}

{{/* An image; what it leaves out is the release's: a list of the root, the image, and a suffix for the release's repository. */}}
{{- define "noetl.imageOf" -}}
{{- $own := index . 1 | default dict -}}
{{- $all := (first .).Values.image -}}
{{- $repository := $own.repository | default (printf "%s%s" $all.repository (last .)) -}}
{{- $digest := $own.digest | default (ternary "" $all.digest (not (empty (coalesce $own.repository $own.tag (last .))))) -}}
{{- if $digest -}}{{ $repository }}@{{ $digest }}{{- else -}}{{ $repository }}:{{ coalesce $own.tag $all.tag (first .).Chart.AppVersion }}{{- end -}}
{{- end -}}

{{/* What selects the pods of a release; with a component's name, of that one. Never changes. */}}
{{- define "noetl.selector" -}}
app.kubernetes.io/name: {{ include "noetl.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .name }}
app.kubernetes.io/component: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "noetl.labels" -}}
{{ include "noetl.selector" . }}
app.kubernetes.io/part-of: noetl-dagster
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The head of an object: its name is the release's with a suffix. */}}
{{- define "noetl.metadata" -}}
name: {{ include "noetl.fullname" .root }}{{ with .suffix | default .name }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace | quote }}
labels: {{- include "noetl.labels" . | nindent 2 }}
{{- with .labels }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "noetl.serviceAccount" -}}
{{- $own := printf "%s-%s" (include "noetl.fullname" .root) .role -}}
{{- $given := get .root.Values.serviceAccounts.roles .role | default dict -}}
{{- $given.name | default (ternary $own "default" .root.Values.serviceAccounts.create) -}}
{{- end -}}

{{/* Whether a service of trials is part of the release: provisioning cannot come before it then. */}}
{{- define "noetl.trial" -}}
{{- if or .Values.postgresql.enabled .Values.nats.enabled .Values.minio.enabled }}true{{ end -}}
{{- end -}}

{{/* Values with others laid over them, 0, false and empty ones too: a list of both. */}}
{{- define "noetl.overlay" -}}
{{- $base := deepCopy (first .) }}
{{- range $key, $value := last . }}
{{- $below := get $base $key }}
{{- if and (kindIs "map" $value) (kindIs "map" $below) }}
{{- $value = include "noetl.map" (list "noetl.overlay" (list $below $value)) | fromJson }}
{{- end }}
{{- $_ := set $base $key $value }}
{{- end }}
{{- toYaml $base }}
{{- end -}}
