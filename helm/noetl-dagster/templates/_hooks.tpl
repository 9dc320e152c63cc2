{{/* Whether provisioning is a hook: where its database, NATS and store are there before the release. */}}
{{- define "noetl.provisionHook" -}}
{{- if and .Values.provision.enabled (not .Values.paused) (not (include "noetl.trial" .)) }}true{{ end -}}
{{- end -}}

{{/* Annotations of a hook before install and upgrade, by its weight. What has failed stays, to be looked at. */}}
{{- define "noetl.hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
