{{/* What roles may do in the namespace; the table of components says who has which. */}}
{{- define "noetl.rights" -}}
launch:  # runs, steps in pods of their own and steps of kind container are Jobs
  - {apiGroups: [batch], resources: [jobs], verbs: [create, get, list, watch, delete]}
  - {apiGroups: [batch], resources: [jobs/status], verbs: [get]}
  - {apiGroups: [""], resources: [pods], verbs: [get, list, watch, delete]}
  - {apiGroups: [""], resources: [pods/log], verbs: [get]}
  - {apiGroups: [""], resources: [events], verbs: [list]}
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
