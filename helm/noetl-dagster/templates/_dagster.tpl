{{/* dagster.yaml: storage, how runs are launched and watched. */}}
{{- define "noetl.dagsterYaml" -}}
{{- $values := .Values }}
{{- $full := include "noetl.fullname" . }}
{{- $run := get (include "noetl.map" (list "noetl.components" .) | fromJson) "run" }}
{{- $pod := include "noetl.map" (list "noetl.podValues" (dict "root" . "component" $run)) | fromJson }}
{{- $given := dict "root" . "component" $run "pod" $pod }}
{{- $variables := dict "root" . "component" (omit $run "dagster") "pod" $pod }}{{/* Dagster sets DAGSTER_HOME */}}
storage:
  custom:
    module: noetl_dagster.compiler.executors.storages
    class: PostgresStorage
    config:
      postgres_url: {env: NOETL_DAGSTER_DB_URL}
run_launcher:
  module: dagster_k8s.launcher
  class: K8sRunLauncher
  config:
    job_namespace: {{ .Release.Namespace | quote }}
    job_image: {{ include "noetl.image" . | quote }}
    image_pull_policy: {{ $values.image.pullPolicy }}
    service_account_name: {{ include "noetl.serviceAccount" (dict "root" . "role" "run") | quote }}
    instance_config_map: {{ $full }}-instance
    dagster_home: /opt/noetl/dagster
    env_config_maps: [{{ $full }}-settings]
    labels: {{- include "noetl.selector" (dict "root" . "name" "run") | nindent 6 }}
    resources: {{- include "noetl.resources" (list $values.runs.resources $pod) | nindent 6 }}
    security_context: {{- include "noetl.containerSecurity" . | nindent 6 }}
    volumes: {{- include "noetl.list" (list "noetl.volumes" $given) | fromJsonArray | toYaml | nindent 6 }}
    volume_mounts: {{- include "noetl.list" (list "noetl.mounts" $given) | fromJsonArray | toYaml | nindent 6 }}
    run_k8s_config:
      container_config:
        env: {{- include "noetl.list" (list "noetl.environment" $variables) | fromJsonArray | toYaml | nindent 10 }}
        {{- with $pod.extraEnvFrom }}
        env_from: {{- toYaml . | nindent 10 }}
        {{- end }}
      pod_spec_config:
        security_context: {{- include "noetl.podSecurity" $given | nindent 10 }}
        enable_service_links: false
        automount_service_account_token: {{ $run.token }}
        {{- $placed := set (omit $pod "topologySpread") "topologySpread" $values.runs.pod.topologySpread }}{{/* else nodes could not be emptied */}}
        {{- with include "noetl.placement" (dict "root" . "name" "run" "pod" $placed) }}
        {{- . | nindent 8 }}
        {{- end }}
      pod_template_spec_metadata:
        labels: {{- include "noetl.podLabels" (dict "root" . "name" "run" "pod" $pod) | nindent 10 }}
        annotations: {{- include "noetl.map" (list "noetl.podAnnotations" $given) | fromJson | toYaml | nindent 10 }}
      {{- with $values.commonLabels }}
      job_metadata:
        labels: {{- toYaml . | nindent 10 }}
      {{- end }}
      job_spec_config:
        ttl_seconds_after_finished: {{ $values.runs.ttlSecondsAfterFinished | int64 }}
    {{- with $values.runs.allowedFields }}
    only_allow_user_defined_k8s_config_fields: {{- toYaml . | nindent 6 }}
    {{- end }}
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
concurrency:
  runs:
    max_concurrent_runs: {{ int64 $values.runs.maxConcurrent }}
    {{- with $values.runs.tagLimits }}
    tag_concurrency_limits: {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- with $values.runs.pools }}
  pools: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- with $values.dagster.runMonitoring }}
run_monitoring:
  enabled: {{ .enabled }}
  start_timeout_seconds: {{ int64 .startTimeoutSeconds }}
  cancel_timeout_seconds: {{ int64 .cancelTimeoutSeconds }}
  max_resume_run_attempts: 0  # the recovery sensor resumes executions in new runs
  poll_interval_seconds: {{ int64 .pollIntervalSeconds }}
{{- end }}
compute_logs: {{- include "noetl.computeLogs" . | trim | nindent 2 }}
local_artifact_storage:
  module: dagster.core.storage.root
  class: LocalArtifactStorage
  config: {base_dir: /var/lib/noetl/dagster}
{{- with $values.dagster.retention }}
retention: {{- toYaml . | nindent 2 }}
{{- end }}
telemetry: {enabled: false}
nux: {enabled: false}
{{- with $values.dagster.extraInstance }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* In the object store where there is one; else they stay in the pod that made them. */}}
{{- define "noetl.computeLogs" -}}
{{- $logs := .Values.dagster.computeLogs }}
{{- $endpoint := include "noetl.minioEndpoint" . }}
{{- $store := include "noetl.logStore" . }}
{{- $bucket := $logs.bucket | default (get .Values.storage $store).bucket }}
{{- if eq $logs.manager "custom" }}
{{- toYaml $logs.custom }}
{{- else if and (eq $logs.manager "gcs") $bucket }}
module: dagster_gcp.gcs.compute_log_manager
class: GCSComputeLogManager
config:
  bucket: {{ $bucket | quote }}
  prefix: {{ $logs.prefix | quote }}
  upload_interval: {{ int64 $logs.uploadInterval }}
  local_dir: /var/lib/noetl/compute
{{- else if and (or (eq $logs.manager "s3") (and (eq $logs.manager "stored") (ne $store "gcs"))) $bucket }}
{{- if eq $logs.manager "s3" }}
module: dagster_aws.s3.compute_log_manager
class: S3ComputeLogManager
{{- else }}
module: noetl_dagster.launcher.stored_logs
class: StoredRunLogs
{{- end }}
config:
  bucket: {{ $bucket | quote }}
  prefix: {{ $logs.prefix | quote }}
  upload_interval: {{ int64 $logs.uploadInterval }}
  local_dir: /var/lib/noetl/compute
  {{- with $endpoint }}
  endpoint_url: {{ . | quote }}
  {{- end }}
{{- else }}
module: noetl_dagster.launcher.compute_logs
class: RunLogs
config: {base_dir: /var/lib/noetl/compute}
{{- end }}
{{- end -}}

{{/* Which store takes what steps print: an S3 store with keys of its own, Google's, or Amazon's. */}}
{{- define "noetl.logStore" -}}
{{- $storage := .Values.storage -}}
{{- if include "noetl.minioEndpoint" . -}}minio
{{- else if and $storage.gcs.bucket (or (eq $storage.tier "gcs") (not $storage.s3.bucket)) -}}gcs
{{- else -}}s3
{{- end -}}
{{- end -}}

{{/* Whether anything of the release asks code locations. */}}
{{- define "noetl.workspace" -}}
{{- if or .Values.dagster.enabled .Values.api.enabled }}true{{ end -}}
{{- end -}}

{{- define "noetl.workspaceYaml" -}}
load_from:
  {{- range $name, $_ := include "noetl.map" (list "noetl.codeLocations" .) | fromJson }}
  - grpc_server:
      host: {{ include "noetl.fullname" $ }}-{{ $name }}
      port: 4000
      location_name: {{ trimPrefix "code-location-" $name | replace "code-location" "noetl_dagster" | quote }}
  {{- end }}
  {{- range .Values.dagster.extraLocations }}
  - grpc_server: {{- toYaml . | nindent 6 }}
  {{- end }}
{{- end -}}

{{/* What Spark starts its executors from. */}}
{{- define "noetl.executorPod" -}}
{{- $executor := get (include "noetl.map" (list "noetl.components" .) | fromJson) "executor" }}
{{- $pod := include "noetl.map" (list "noetl.podValues" (dict "root" . "component" $executor)) | fromJson -}}
apiVersion: v1
kind: Pod
metadata:
  labels: {{- include "noetl.podLabels" (dict "root" . "name" "executor" "pod" $pod) | nindent 4 }}
  {{- with include "noetl.map" (list "noetl.podAnnotations" (dict "root" . "component" $executor "pod" $pod)) | fromJson }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext: {{- include "noetl.podSecurity" (dict "component" $executor "pod" $pod) | nindent 4 }}
  {{- include "noetl.placement" (dict "root" . "name" "executor" "pod" $pod) | trim | nindent 2 }}
  containers:
    - name: spark-kubernetes-executor
      securityContext: {{- include "noetl.containerSecurity" . | nindent 8 }}
      {{- with include "noetl.map" (list "noetl.resources" (list dict $pod)) | fromJson }}
      resources: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $pod.extraEnvFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $pod.extraEnv }}
      env: {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: work, mountPath: /opt/spark/work-dir}
        {{- if .Values.storage.pvc.enabled }}
        - {name: shared, mountPath: {{ .Values.storage.pvc.mountPath | quote }}}
        {{- end }}
        {{- with $pod.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {sizeLimit: {{ $pod.scratchSize }}}}
    - {name: work, emptyDir: {sizeLimit: {{ $pod.scratchSize }}}}
    {{- with $pod.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if .Values.storage.pvc.enabled }}
    {{- include "noetl.sharedVolume" . | trim | nindent 4 }}
    {{- end }}
{{- end -}}
