{{/* What no schema can say: values that need each other. Fails with the name of the value and the remedy. */}}
{{- define "noetl.check" -}}
{{- range list "noetl.settings" "noetl.dagsterYaml" "noetl.workspaceYaml" }}{{ $_ := include "noetl.map" (list . $.root) }}{{ end }}
{{- $values := .root.Values }}
{{- $store := $values.storage }}
{{- if and (eq $store.tier "minio") (not (include "noetl.minioEndpoint" .root)) }}
{{- fail "storage.minio.endpoint: the tier minio needs the address of an S3 store; give it, set minio.enabled for a trial, or choose another storage.tier" }}
{{- end }}
{{- if and (eq $store.tier "s3") (not $store.s3.bucket) }}{{ fail "storage.s3.bucket: the tier s3 needs a bucket" }}{{ end }}
{{- if and (eq $store.tier "gcs") (not $store.gcs.bucket) }}{{ fail "storage.gcs.bucket: the tier gcs needs a bucket" }}{{ end }}
{{- if and (eq $store.tier "pvc") (not $store.pvc.enabled) }}{{ fail "storage.pvc.enabled: the tier pvc needs a volume" }}{{ end }}
{{- if and $values.workers.pools (not $values.api.enabled) (not $values.workers.serverUrl) }}
{{- fail "workers.serverUrl: workers claim from the HTTP API; set api.enabled, give the address of another, or set workers.pools to {}" }}
{{- end }}
{{- if and (include "noetl.workspace" .root) (not $values.dagster.enabled) (not $values.dagster.extraLocations) }}
{{- fail "dagster.extraLocations: the API launches runs of code locations, and there is none; name those of Dagster's own chart, or set api.enabled to false" }}
{{- end }}
{{- if and $values.rbac.create (not $values.serviceAccounts.create) }}
{{- range .components }}
{{- if and .rights (not (get (default dict (get $values.serviceAccounts.roles .role)) "name")) }}
{{- fail (printf "serviceAccounts.roles.%s.name: name the service account that gets the rights, or set rbac.create to false" .role) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $key, $_ := $values.dagster.extraInstance }}
{{- if has $key (list "storage" "run_launcher" "run_coordinator" "concurrency" "run_monitoring" "compute_logs" "local_artifact_storage" "retention" "telemetry" "nux") }}
{{- fail (printf "dagster.extraInstance.%s: the chart writes this key of dagster.yaml itself; use its own values" $key) }}
{{- end }}
{{- end }}
{{- if and (eq $values.dagster.computeLogs.manager "s3") (eq (include "noetl.logStore" .root) "gcs") }}
{{- fail "dagster.computeLogs.manager: s3 is for S3; stored puts what steps print into the bucket of storage.gcs" }}
{{- end }}
{{- if and $values.ingress.enabled (not $values.ingress.webserver.host) (not $values.ingress.api.host) }}
{{- fail "ingress.webserver.host or ingress.api.host: an ingress needs the name of a host" }}
{{- end }}
{{- if $values.nats.enabled }}{{ if eq (mod (int $values.nats.replicas) 2) 0 }}{{ fail "nats.replicas: servers vote; take 1, 3 or 5" }}{{ end }}{{ end }}
{{- if and $values.monitoring.rules.enabled (not (.root.Files.Get "files/alerts.yaml")) }}
{{- fail "monitoring.rules.enabled: the chart has no files/alerts.yaml" }}
{{- end }}
{{- end -}}

{{/* Where Prometheus finds a token of the scope reader. */}}
{{- define "noetl.metricsToken" -}}
{{- with .Values.monitoring.serviceMonitor.token -}}
{{- if .name -}}
{{ dict "name" .name "key" .key | toJson }}
{{- else if include "noetl.trial" $ -}}
{{ dict "name" (printf "%s-trial" (include "noetl.fullname" $)) "key" "operator-token" | toJson }}
{{- else -}}
{{ fail "monitoring.serviceMonitor.token.name: name the Secret with a token of the scope reader, which /metrics asks for" }}
{{- end -}}
{{- end -}}
{{- end -}}
