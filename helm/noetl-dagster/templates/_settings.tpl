{{/* The plain settings that all processes share: those of the chart's values, then those of the value settings. */}}
{{- define "noetl.settings" -}}
{{ include "noetl.ownSettings" . | trim }}
{{- range $name, $value := .Values.settings }}
{{ $name }}: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end -}}

{{- define "noetl.ownSettings" -}}
{{- $full := include "noetl.fullname" . -}}
{{- with .Values }}
NOETL_EMBEDDED: "false"
NOETL_HOME: /var/lib/noetl
NOETL_LOG_FORMAT: json
NOETL_LOG_LEVEL: {{ .logLevel | quote }}
NOETL_PLAYBOOKS_PATH: /opt/noetl/playbooks
NOETL_DEFAULT_STORE_TIER: {{ .storage.tier | quote }}
{{- with include "noetl.minioEndpoint" $ }}
NOETL_MINIO_ENDPOINT: {{ . | quote }}
NOETL_MINIO_BUCKET: {{ $.Values.storage.minio.bucket | quote }}
NOETL_MINIO_REGION: {{ $.Values.storage.minio.region | quote }}
NOETL_MINIO_VERIFY: {{ $.Values.storage.minio.verify | quote }}
{{- end }}
{{- with .storage.s3.bucket }}
NOETL_S3_BUCKET: {{ . | quote }}
{{- end }}
{{- with .storage.gcs.bucket }}
NOETL_GCS_BUCKET: {{ . | quote }}
{{- end }}
{{- if .storage.pvc.enabled }}
NOETL_PVC_MOUNT_PATH: {{ .storage.pvc.mountPath | quote }}
{{- end }}
{{- if .api.enabled }}
NOETL_SERVER_URL: {{ printf "%s://%s-api:8700" (ternary "https" "http" (ne .api.tls.secretName "")) $full }}
{{- end }}
{{- with .ingress }}{{ if .enabled }}
{{- $scheme := ternary "https" "http" (or (gt (len .tls) 0) (ne .kind "Ingress")) }}
{{- with .webserver.host }}
NOETL_DAGSTER_URL: {{ $scheme }}://{{ . }}{{ $.Values.dagster.webserver.pathPrefix }}
{{- end }}
{{- with .api.host }}
NOETL_PAGES_URL: {{ $scheme }}://{{ . }}
{{- end }}
{{- end }}{{ end }}
{{- if or .runs.containers .workers.containers }}
NOETL_CONTAINER_POD: {{ include "noetl.map" (list "noetl.containerPod" $) | quote }}
NOETL_CONTAINER_DEADLINE_SECONDS: {{ .containers.deadlineSeconds | int64 | quote }}
{{- end }}
{{- with .tracing.endpoint }}
NOETL_TRACING_ENDPOINT: {{ . | quote }}
NOETL_TRACING_SAMPLING: {{ $.Values.tracing.sampling | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What every pod of a container step has: of the value pod what suits any image. */}}
{{- define "noetl.containerPod" -}}
{{- $component := dict "values" .Values.containers }}
{{- $pod := include "noetl.map" (list "noetl.podValues" (dict "root" . "component" $component)) | fromJson }}
{{- $pod = omit $pod "topologySpread" "initContainers" "gracePeriodSeconds" }}{{/* for any image, and placed as runs are */}}
metadata:
  labels: {{- include "noetl.podLabels" (dict "root" . "name" "container" "pod" $pod) | nindent 4 }}
  annotations: {{- $pod.annotations | toYaml | nindent 4 }}
spec:
  serviceAccountName: {{ include "noetl.serviceAccount" (dict "root" . "role" "container") | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext: {{- include "noetl.podSecurity" (dict "component" $component "pod" $pod) | nindent 4 }}
  {{- include "noetl.placement" (dict "root" . "name" "container" "pod" $pod) | trim | nindent 2 }}
  containers:
    - resources: {{- include "noetl.resources" (list .Values.containers.resources $pod) | nindent 8 }}
      securityContext: {{- omit (include "noetl.map" (list "noetl.containerSecurity" .) | fromJson) "readOnlyRootFilesystem" | toYaml | nindent 8 }}
{{- end -}}

{{- define "noetl.minioEndpoint" -}}
{{- if .Values.minio.enabled -}}
http://{{ include "noetl.fullname" . }}-minio:9000
{{- else -}}
{{ .Values.storage.minio.endpoint }}
{{- end -}}
{{- end -}}

{{/* The names of the secrets, in the order of their variables, and which of them a service of trials provides. */}}
{{- define "noetl.secrets" -}}
{{- $trial := include "noetl.trial" . | eq "true" }}
dbUrl: {variable: NOETL_DB_URL, provided: {{ .Values.postgresql.enabled }}}
dagsterDbUrl: {variable: NOETL_DAGSTER_DB_URL, provided: {{ .Values.postgresql.enabled }}}
natsUrl: {variable: NOETL_NATS_URL, provided: {{ .Values.nats.enabled }}}
serviceTokens: {variable: NOETL_SERVICE_TOKENS, provided: {{ $trial }}}
serverToken: {variable: NOETL_SERVER_TOKEN, provided: {{ $trial }}}
credentialKey: {variable: NOETL_CREDENTIAL_KEY, provided: {{ $trial }}, optional: true}
minioAccessKey: {variable: NOETL_MINIO_ACCESS_KEY, provided: {{ .Values.minio.enabled }}}
minioSecretKey: {variable: NOETL_MINIO_SECRET_KEY, provided: {{ .Values.minio.enabled }}}
{{- end -}}

{{/* Variables from Secrets: of root the secrets that names lists. */}}
{{- define "noetl.secretVariables" -}}
{{- $root := .root -}}
{{- $known := include "noetl.map" (list "noetl.secrets" $root) | fromJson -}}
{{- range $secret := .names }}
{{- $entry := get $root.Values.secrets $secret }}
{{- $about := get $known $secret }}
{{- if or (not (hasPrefix "minio" $secret)) (include "noetl.minioEndpoint" $root) }}
{{- $name := $entry.name }}
{{- $key := $entry.key }}
{{- if and (not $name) $about.provided }}
{{- $name = printf "%s-trial" (include "noetl.fullname" $root) }}
{{- $key = $about.variable }}
{{- end }}
{{- $name = $name | default $root.Values.secrets.name }}
{{- if or $name (not $about.optional) }}
- name: {{ $about.variable }}
  valueFrom:
    secretKeyRef:
      name: {{ required (printf "secrets.%s.name or secrets.name: name the Secret that holds %s" $secret $about.variable) $name | quote }}
      key: {{ $key | quote }}
      {{- if $about.optional }}
      optional: true
      {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Spark, for a process that runs tools. How many cores and how much memory its pod has it finds itself. */}}
{{- define "noetl.sparkVariables" -}}
{{- $spark := .Values.spark -}}
{{- $config := dict }}
{{- if eq $spark.mode "connect" }}
- name: NOETL_SPARK_REMOTE
  value: {{ required "spark.remote: the address of Spark Connect, sc://host:15002" $spark.remote | quote }}
{{- else }}
{{- if eq $spark.mode "standalone" }}
- name: NOETL_SPARK_MASTER
  value: {{ required "spark.master: the address of the master, spark://host:7077" $spark.master | quote }}
{{- else if eq $spark.mode "kubernetes" }}
{{- $config = include "noetl.map" (list "noetl.sparkOnKubernetes" .) | fromJson }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: NOETL_SPARK_MASTER
  value: {{ default "k8s://https://kubernetes.default.svc" $spark.master | quote }}
{{- end }}
{{- with $spark.driverMemory }}
- {name: NOETL_SPARK_DRIVER_MEMORY, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- with mergeOverwrite $config $spark.config }}
- name: NOETL_SPARK_CONFIG
  value: {{ toJson . | quote }}
{{- end }}
{{- end -}}

{{- define "noetl.sparkOnKubernetes" -}}
{{- $executors := .Values.spark.executors -}}
spark.kubernetes.container.image: {{ include "noetl.imageOf" (list . $executors.image "-spark") | quote }}
spark.kubernetes.container.image.pullPolicy: {{ .Values.image.pullPolicy | quote }}
spark.kubernetes.authenticate.executor.serviceAccountName: {{ include "noetl.serviceAccount" (dict "root" . "role" "executor") }}
spark.kubernetes.executor.podTemplateFile: /opt/noetl/spark/executor.yaml
spark.kubernetes.driver.pod.name: $(POD_NAME)
spark.executor.instances: {{ $executors.instances | quote }}
spark.executor.cores: {{ $executors.cores | quote }}
spark.executor.memory: {{ $executors.memory | quote }}
spark.driver.port: "7078"
spark.driver.blockManager.port: "7079"
spark.blockManager.port: "7079"
{{- end -}}
