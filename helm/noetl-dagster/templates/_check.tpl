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
{{- $written := list "storage" "run_storage" "event_log_storage" "schedule_storage" "run_launcher" "run_coordinator" "run_queue" "concurrency" "run_monitoring" "compute_logs" "local_artifact_storage" "retention" "telemetry" "nux" }}
{{- range $key, $_ := $values.dagster.extraInstance }}
{{- if has $key $written }}
{{- fail (printf "dagster.extraInstance.%s: the chart writes this key of dagster.yaml itself; use its own values" $key) }}
{{- end }}
{{- end }}
{{- $logs := $values.dagster.computeLogs }}
{{- if and (eq $logs.manager "custom") (not (and $logs.custom.module $logs.custom.class)) }}
{{- fail "dagster.computeLogs.custom: the manager custom needs module and class" }}
{{- end }}
{{- $secrets := dict "NOETL_MINIO_SESSION_TOKEN" "name" }}
{{- range $secret, $about := include "noetl.map" (list "noetl.secrets" .root) | fromJson }}{{ $_ := set $secrets $about.variable (printf "%s.name" $secret) }}{{ end }}
{{- $set := include "noetl.map" (list "noetl.ownSettings" .root) | fromJson }}
{{- range .components }}{{ $set = merge $set (default dict .env) }}{{ end }}
{{- range $name, $_ := $values.settings }}
{{- with get $secrets $name }}
{{- fail (printf "settings.%s: a ConfigMap would show this secret to everybody; put it into a Secret under the key %s, and name the Secret in secrets.name or secrets.%s" $name $name .) }}
{{- end }}
{{- if hasKey $set $name }}
{{- fail (printf "settings.%s: another value of the chart sets it; look for %s in docs/reference/chart-values.md" $name $name) }}
{{- end }}
{{- end }}
{{- include "noetl.checkComponents" . }}
{{- if and (eq $values.dagster.computeLogs.manager "s3") (eq (include "noetl.logStore" .root) "gcs") }}
{{- fail "dagster.computeLogs.manager: s3 is for S3; gcs puts what steps print into the bucket of storage.gcs" }}
{{- end }}
{{- if and $values.ingress.enabled (not $values.ingress.webserver.host) (not $values.ingress.api.host) }}
{{- fail "ingress.webserver.host or ingress.api.host: an ingress needs the name of a host" }}
{{- end }}
{{- if $values.ingress.enabled }}
{{- if and (eq $values.ingress.kind "HTTPRoute") (not $values.ingress.parentRefs) }}{{ fail "ingress.parentRefs: name the Gateway of the HTTPRoutes" }}{{ end }}
{{- if and (ne $values.ingress.kind "Ingress") $values.ingress.tls }}{{ fail (printf "ingress.tls: %s has no certificates; the %s" $values.ingress.kind (ternary "Gateway has them" "router has them" (eq $values.ingress.kind "HTTPRoute"))) }}{{ end }}
{{- if and $values.ingress.api.host (not $values.api.enabled) }}{{ fail "ingress.api.host: api.enabled is false; there is nothing to lead to" }}{{ end }}
{{- if and $values.ingress.webserver.host (not $values.dagster.enabled) }}{{ fail "ingress.webserver.host: dagster.enabled is false; Dagster's own chart has an Ingress" }}{{ end }}
{{- $hosts := list $values.ingress.webserver.host $values.ingress.api.host }}
{{- range $values.ingress.tls }}
{{- range .hosts }}
{{- if not (has . $hosts) }}{{ fail (printf "ingress.tls: %s is neither ingress.webserver.host nor ingress.api.host" .) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- $own := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" }}
{{- range $key, $_ := $values.commonLabels }}
{{- if has $key (concat $own (list "app.kubernetes.io/part-of" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart")) }}
{{- fail (printf "commonLabels.%s: the chart writes this label itself" $key) }}
{{- end }}
{{- end }}
{{- $full := include "noetl.fullname" .root }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) }}
{{- fail (printf "fullnameOverride: names of Services begin with a letter and have no dots, and %q would begin all names; set fullnameOverride to another" $full) }}
{{- end }}
{{- if and $values.monitoring.rules.enabled (not (.root.Files.Get "files/alerts.yaml")) }}
{{- fail "monitoring.rules.enabled: the chart has no files/alerts.yaml" }}
{{- end }}
{{- end -}}

{{/* Each component: that limits are above requests, that a pool can scale, and that nothing stands twice in its pods. */}}
{{- define "noetl.checkComponents" -}}
{{- $root := .root }}
{{- range $name, $component := .components }}
{{- $resources := default dict $component.values.resources }}
{{- range $what := list "cpu" "memory" "ephemeral-storage" }}
{{- $request := dig "requests" $what "" $resources }}
{{- $limit := dig "limits" $what "" $resources }}
{{- if and $request $limit }}
{{- if gt (include "noetl.quantity" $request | float64) (include "noetl.quantity" $limit | float64) }}
{{- fail (printf "resources of %s: requests.%s %v is above limits.%s %v" $name $what $request $what $limit) }}
{{- end }}
{{- end }}
{{- end }}
{{- if $component.scaled }}
{{- $scaling := $component.values.autoscaling }}
{{- $pool := trimPrefix "worker-" $name }}
{{- if gt (int64 $scaling.minReplicas) (int64 $scaling.maxReplicas) }}
{{- fail (printf "workers.pools.%s.autoscaling: minReplicas %v is above maxReplicas %v" $pool $scaling.minReplicas $scaling.maxReplicas) }}
{{- end }}
{{- if gt (int64 $scaling.depthPerWorker) (int64 $component.values.slots) }}
{{- fail (printf "workers.pools.%s.autoscaling.depthPerWorker: %v is above its slots, %v; commands would wait for a worker that nothing asks for. 0 takes the slots" $pool $scaling.depthPerWorker $component.values.slots) }}
{{- end }}
{{- end }}
{{- $pod := include "noetl.map" (list "noetl.podValues" (dict "root" $root "component" $component)) | fromJson }}
{{- range $key, $_ := default dict $component.values.pod }}
{{- if and (not $component.kind) (has $key (list "extraContainers" "probes" "strategy" "workloadAnnotations")) }}
{{- fail (printf "pod.%s of %s: only Deployments and StatefulSets have it; take it away" $key $name) }}
{{- end }}
{{- end }}
{{- range $key, $_ := $pod.labels }}
{{- if has $key (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") }}
{{- fail (printf "pod.labels.%s of %s: Services and policies find pods by this label; take another" $key $name) }}
{{- end }}
{{- end }}
{{- if eq $name "executor" }}
{{- $spec := (include "noetl.map" (list "noetl.executorPod" $root) | fromJson).spec }}
{{- include "noetl.checkVolumes" (list $name $spec.volumes (first $spec.containers).volumeMounts) }}
{{- else }}
{{- $given := dict "root" $root "component" $component "pod" $pod }}
{{- include "noetl.checkVolumes" (list $name (include "noetl.list" (list "noetl.volumes" $given) | fromJsonArray) (include "noetl.list" (list "noetl.mounts" $given) | fromJsonArray)) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A pod's volumes and mounts: a list of its component, both. */}}
{{- define "noetl.checkVolumes" -}}
{{- $component := first . }}
{{- $volumes := dict }}
{{- range index . 1 }}
{{- if hasKey $volumes .name }}
{{- fail (printf "pod.extraVolumes: pods of %s have a volume %s already; take another name" $component .name) }}
{{- end }}
{{- $_ := set $volumes .name true }}
{{- end }}
{{- $paths := dict }}
{{- range index . 2 }}
{{- $path := trimSuffix "/" .mountPath }}
{{- $value := eq .name "shared" | ternary "storage.pvc.mountPath" "pod.extraVolumeMounts" }}
{{- if or (hasKey $paths $path) (has $path (list "" "/bin" "/dev" "/etc" "/lib" "/opt" "/opt/noetl" "/opt/noetl/.venv" "/opt/spark" "/proc" "/sbin" "/sys" "/usr" "/var" "/var/lib")) }}
{{- fail (printf "%s: something else is at %s in pods of %s; take a folder of its own, such as /mnt/shared" $value .mountPath $component) }}
{{- end }}
{{- if not (or (hasKey $volumes .name) (eq .name "data")) }}{{/* of a StatefulSet */}}
{{- fail (printf "pod.extraVolumeMounts: %s is no volume of pods of %s; name it in pod.extraVolumes" .name $component) }}
{{- end }}
{{- $_ := set $paths $path true }}
{{- end }}
{{- end -}}

{{/* A quantity of cores or bytes as a number. */}}
{{- define "noetl.quantity" -}}
{{- $number := regexFind "^[0-9.]+" (toString .) | float64 }}
{{- $unit := regexFind "[A-Za-z]+$" (toString .) }}
{{- mulf $number (get (dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0) $unit) }}
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
