{{/* What roles may do in the namespace; the table of components says who has which. */}}
{{- define "noetl.rights" -}}
launch:  # runs, steps in pods of their own and steps of kind container are Jobs
  - {apiGroups: [batch], resources: [jobs], verbs: [create, get, list, watch, patch, delete]}
  - {apiGroups: [batch], resources: [jobs/status], verbs: [get]}
  - {apiGroups: [""], resources: [pods], verbs: [get, list, watch, delete]}
  - {apiGroups: [""], resources: [pods/log], verbs: [get]}
  - {apiGroups: [""], resources: [events], verbs: [list]}
  - {apiGroups: [""], resources: [secrets], verbs: [create]}  # with the secret variables of a container's Job, which owns it
control:  # looks at runs and ends them
  - {apiGroups: [batch], resources: [jobs], verbs: [get, list, watch, delete]}
  - {apiGroups: [batch], resources: [jobs/status], verbs: [get]}
  - {apiGroups: [""], resources: [pods], verbs: [get, list, watch, delete]}
  - {apiGroups: [""], resources: [pods/log], verbs: [get]}
  - {apiGroups: [""], resources: [events], verbs: [list]}
executors:  # of Spark, which a driver starts and removes
  - {apiGroups: [""], resources: [pods], verbs: [create, get, list, watch, delete, deletecollection]}
  - {apiGroups: [""], resources: [configmaps], verbs: [create, get, list, watch, delete, deletecollection]}
  - {apiGroups: [""], resources: [persistentvolumeclaims], verbs: [list, deletecollection]}
{{- with .Values.rbac.readSecrets }}
secrets:  # of the secrets provider kubernetes
  - {apiGroups: [""], resources: [secrets], resourceNames: {{ toJson . }}, verbs: [get]}
{{- end }}
{{- end -}}

{{/* The service account of a role, where it is the release's own. Tokens are a matter of its pods. */}}
{{- define "noetl.account" -}}
{{- $accounts := .root.Values.serviceAccounts }}
{{- $given := get $accounts.roles .role | default dict }}
{{- if and $accounts.create (not $given.name) }}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{- include "noetl.metadata" (dict "root" .root "name" .role "annotations" (merge .annotations (default dict $given.annotations) $accounts.annotations)) | nindent 2 }}
automountServiceAccountToken: false
{{- end }}
{{- end -}}
