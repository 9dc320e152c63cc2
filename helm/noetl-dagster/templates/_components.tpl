{{/*
The table of components: what each runs, what it may reach, and what it is allowed. Every other file goes through it.

kind      of the workload; left out: pods that others start; schedule: of a CronJob
values    the part of values.yaml with replicas, resources, disruptionBudget and pod
role      of its service account; token: whether pods get one; rights: its Roles
secrets   that it gets, by their names in values.secrets
settings  whether it gets the shared settings
dagster   whether it gets dagster.yaml; workspace, playbooks, shared, tools: likewise
ports     of its container, by name; service: whether they are a Service's
reaches   components and outside services that it connects to: all that network policies allow
*/}}
{{- define "noetl.components" -}}
{{- $values := .Values }}
{{- $stores := list "postgresql" "nats" "objects" }}
{{- $engine := list "dbUrl" "dagsterDbUrl" "natsUrl" "credentialKey" "minioAccessKey" "minioSecretKey" }}
{{- $traced := ternary (list "tracing") list (ne $values.tracing.endpoint "") }}
{{- $executors := eq $values.spark.mode "kubernetes" }}
{{- $jobs := $values.workers.containers }}
{{- $readers := ternary (list "secrets") list (gt (len $values.rbac.readSecrets) 0) }}
{{- $sparkRights := ternary (list "executors") list $executors }}
{{- $cluster := or $jobs $executors $readers }}
{{- $runsInCluster := or $values.runs.containers $executors $readers }}
{{- $any := ternary "0.0.0.0" "::" (eq $values.ipFamily "IPv4") }}
{{- $locations := list "locations" }}
{{- range $name, $_ := include "noetl.map" (list "noetl.codeLocations" .) | fromJson }}{{ $locations = append $locations $name }}{{ end }}
{{- if $values.dagster.enabled }}
webserver:
  kind: Deployment
  values: {{ toJson $values.dagster.webserver }}
  role: webserver
  {{- if not $values.dagster.webserver.readOnly }}
  token: true
  rights: [control]
  {{- end }}
  args: [dagster-webserver, -h, {{ $any | quote }}, -p, "3000", -w, /opt/noetl/workspace/workspace.yaml
    {{- if $values.dagster.webserver.readOnly }}, --read-only{{ end }}
    {{- with $values.dagster.webserver.pathPrefix }}, --path-prefix, {{ . | quote }}{{ end }}]
  ports: {http: 3000}
  service: true
  lingers: true
  probes: {{- include "noetl.httpProbes" (dict "live" (printf "%s/server_info" $values.dagster.webserver.pathPrefix)) | nindent 4 }}
  secrets: [dagsterDbUrl, minioAccessKey, minioSecretKey]
  settings: true
  dagster: true
  workspace: true
  reaches: {{ concat $locations (list "postgresql" "objects") (ternary list (list "kubernetes") $values.dagster.webserver.readOnly) | toJson }}
daemon:
  kind: Deployment
  values: {{ toJson $values.dagster.daemon }}
  replicas: 1
  strategy: {type: Recreate}  # two would start what one has started
  role: daemon
  token: true
  rights: [launch]
  args: [dagster-daemon, run, -w, /opt/noetl/workspace/workspace.yaml]
  probes:  # each one starts a process that reads the daemon's heartbeats from Dagster's storage
    startup: {exec: {command: [dagster-daemon, liveness-check]}, periodSeconds: 10, timeoutSeconds: 30, failureThreshold: 30}
    liveness: {exec: {command: [dagster-daemon, liveness-check]}, periodSeconds: 60, timeoutSeconds: 30, failureThreshold: 10}
  secrets: [dagsterDbUrl, minioAccessKey, minioSecretKey]
  settings: true
  dagster: true
  workspace: true
  reaches: {{ concat $locations (list "postgresql" "objects" "kubernetes") | toJson }}
{{- range $name, $location := include "noetl.map" (list "noetl.codeLocations" .) | fromJson }}
{{ $name }}:
  kind: Deployment
  values: {{ toJson $location }}
  image: {{ include "noetl.imageOf" (list $ $location.image "") | quote }}
  replicas: 1
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
  role: code-location
  args: [dagster, api, grpc, -h, {{ ternary "0.0.0.0" "[::]" (eq $values.ipFamily "IPv4") | quote }}, -p, "4000", -m, {{ $location.module | quote }}]
  ports: {grpc: 4000}
  service: true
  lingers: true
  probes:
    startup: {grpc: {port: 4000, service: DagsterApi}, periodSeconds: 5, timeoutSeconds: 5, failureThreshold: 60}
    readiness: {grpc: {port: 4000, service: DagsterApi}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 3}
    liveness: {grpc: {port: 4000, service: DagsterApi}, periodSeconds: 30, timeoutSeconds: 10, failureThreshold: 6}
  env: {DAGSTER_CURRENT_IMAGE: {{ include "noetl.imageOf" (list $ $location.image "") | quote }}}  # runs have the image of the code that they were planned with
  secrets: {{ toJson $engine }}
  settings: true
  dagster: true
  playbooks: true
  shared: true
  reaches: {{ concat $stores $traced | toJson }}
{{- end }}
{{- end }}
{{- if $values.api.enabled }}
api:
  kind: Deployment
  values: {{ toJson $values.api }}
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
  role: api
  token: true
  rights: [control]
  args: [noetl-dagster, serve]
  ports: {api: 8700}
  service: true
  lingers: true
  grace: 45
  probes: {{- include "noetl.httpProbes" (dict "live" "/health" "ready" "/ready" "port" "api" "scheme" (ternary "HTTPS" "HTTP" (ne $values.api.tls.secretName ""))) | nindent 4 }}
  env:
    NOETL_SERVICE_HOST: {{ $any | quote }}
    NOETL_SERVICE_PORT: "8700"
    NOETL_SERVICE_PROCESSES: {{ int64 $values.api.processes | quote }}
    NOETL_RUN_LAUNCHER: dagster
    NOETL_WORKSPACE: /opt/noetl/workspace/workspace.yaml
    {{- if $values.api.tls.secretName }}
    NOETL_SERVICE_TLS_CERT: /opt/noetl/tls/tls.crt
    NOETL_SERVICE_TLS_KEY: /opt/noetl/tls/tls.key
    {{- else }}
    NOETL_SERVICE_TLS_TERMINATED: "true"
    {{- end }}
  secrets: {{ append $engine "serviceTokens" | toJson }}
  settings: true
  dagster: true
  workspace: true
  playbooks: true
  shared: true
  tls: {{ $values.api.tls.secretName | quote }}
  reaches: {{ concat $stores $traced $locations (list "kubernetes") | toJson }}
{{- end }}
{{- if $values.ingest.enabled }}
ingest:
  kind: Deployment
  values: {{ toJson $values.ingest }}
  role: ingest
  args: [noetl-dagster, ingest]
  ports: {health: 8701}
  probes: {{- include "noetl.httpProbes" (dict "live" "/health" "ready" "/ready" "port" "health") | nindent 4 }}
  env: {NOETL_HEALTH_HOST: {{ $any | quote }}, NOETL_HEALTH_PORT: "8701"}
  secrets: [dbUrl, natsUrl, minioAccessKey, minioSecretKey]
  settings: true
  shared: true
  reaches: {{ concat $stores $traced | toJson }}
{{- end }}
{{- range $pool, $own := $values.workers.pools }}
{{- $worker := include "noetl.map" (list "noetl.overlay" (list $values.workers.defaults (default dict $own))) | fromJson }}
worker-{{ $pool }}:
  kind: Deployment
  image: {{ include "noetl.imageOf" (list $ $worker.image "") | quote }}
  values: {{ toJson $worker }}
  scaled: {{ ne $worker.autoscaling.kind "none" }}
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 25%, maxUnavailable: 25%}}
  role: worker
  token: {{ not (empty $cluster) }}
  rights: {{ concat (ternary (list "launch") list $jobs) $sparkRights $readers | toJson }}
  args: [noetl-dagster, worker]
  ports: {health: 8701{{ if $executors }}, driver: 7078, driver-blocks: 7079{{ end }}}
  grace: {{ add (int64 $values.workers.drainSeconds) 30 }}
  probes: {{- include "noetl.httpProbes" (dict "live" "/health" "ready" "/ready" "port" "health") | nindent 4 }}
  env:
    {{- with $values.workers.serverUrl }}
    NOETL_SERVER_URL: {{ . | quote }}
    {{- end }}
    NOETL_EVENT_TRANSPORT: {{ $values.workers.transport }}
    NOETL_HEALTH_HOST: {{ $any | quote }}
    NOETL_HEALTH_PORT: "8701"
    NOETL_WORKER_POOL: {{ $pool | quote }}
    NOETL_WORKER_SLOTS: {{ int64 $worker.slots | quote }}
    NOETL_WORKER_DRAIN_SECONDS: {{ int64 $values.workers.drainSeconds | quote }}
    {{- with $worker.toolPools }}
    NOETL_WORKER_TOOL_POOLS: {{ toJson . | quote }}
    {{- end }}
  secrets: [dbUrl, natsUrl, serverToken, credentialKey, minioAccessKey, minioSecretKey]
  settings: true
  playbooks: true
  shared: true
  tools: true
  serverCa: true
  reaches: {{ concat $stores $traced (list "api" "tools") (ternary (list "executor") list $executors) (ternary (list "kubernetes") list (not (empty $cluster))) | toJson }}
{{- end }}
run:
  values: {{ toJson $values.runs }}
  role: run
  token: {{ not (empty $runsInCluster) }}
  rights: {{ concat (ternary (list "launch") list $values.runs.containers) $sparkRights $readers | toJson }}
  {{- if $executors }}
  ports: {driver: 7078, driver-blocks: 7079}
  {{- end }}
  secrets: {{ toJson $engine }}
  settings: true
  dagster: true
  playbooks: true
  shared: true
  tools: true
  serverCa: true
  reaches: {{ concat $stores $traced (list "api" "tools") (ternary (list "executor") list $executors) (ternary (list "kubernetes") list (not (empty $runsInCluster))) | toJson }}
{{- if or $values.runs.containers $jobs }}
container:
  values: {{ toJson $values.containers }}
  role: container
  reaches: [tools]
{{- end }}
{{- if $executors }}
executor:
  role: executor
  shared: true
  ports: {blocks: 7079}
  values: {pod: {{ toJson $values.spark.executors.pod }}}
  reaches: [run, postgresql, objects, tools, executor
    {{- range $pool, $own := $values.workers.pools }}, worker-{{ $pool }}{{ end }}]
{{- end }}
{{- if $values.provision.enabled }}
provision:
  values: {{ toJson $values.provision }}
  role: provision
  args: [noetl-dagster, provision, --wait, {{ int64 $values.provision.waitSeconds | quote }}, --lock-wait, {{ int64 $values.provision.lockSeconds | quote }}]
  shared: {{ include "noetl.trial" . | eq "true" }}
  secrets: [dbUrl, dagsterDbUrl, natsUrl, minioAccessKey, minioSecretKey]
  settings: true
  dagster: true
  reaches: {{ toJson $stores }}
{{- end }}
{{- if $values.upkeep.enabled }}
{{- range $name, $command := dict "reaper" (list "reap") "maintenance" (list "maintain") }}
{{ $name }}:
  schedule: {{ get $values.upkeep $name | quote }}
  values: {{ toJson $values.upkeep }}
  role: upkeep
  token: true
  rights: [control]
  args: {{ concat (list "noetl-dagster") $command | toJson }}
  secrets: [dbUrl, natsUrl, minioAccessKey, minioSecretKey]
  settings: true
  shared: true
  reaches: {{ concat $stores $traced (list "kubernetes") | toJson }}
{{- end }}
{{- end }}
test:
  values: {{ toJson $values.test }}
  role: test
  command: [/bin/sh, -ec]
  args:
    - |
      noetl-dagster doctor
      {{- if $values.api.enabled }}
      python -c 'import os, ssl, urllib.request as http; print(http.urlopen(os.environ["NOETL_SERVER_URL"] + "/ready", timeout=30, context=ssl._create_unverified_context()).read().decode())'
      {{- end }}
  secrets: [dbUrl, dagsterDbUrl, natsUrl, serverToken, credentialKey, minioAccessKey, minioSecretKey]
  settings: true
  dagster: true
  playbooks: true
  shared: true
  serverCa: true
  reaches: {{ concat $stores $traced (list "api" "tools") | toJson }}
{{- include "noetl.trialComponents" . }}
{{- end -}}

{{/* The code locations of the release: each of dagster.codeLocations overrides dagster.codeLocation. */}}
{{- define "noetl.codeLocations" -}}
{{- $dagster := .Values.dagster }}
{{- if $dagster.enabled }}
code-location: {{ toJson $dagster.codeLocation }}
{{- range $name, $own := $dagster.codeLocations }}
code-location-{{ $name }}: {{ include "noetl.map" (list "noetl.overlay" (list $dagster.codeLocation (default dict $own))) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Probes over HTTP: ready is left out where it is no other question than live. */}}
{{- define "noetl.httpProbes" -}}
{{- $port := default "http" .port }}
{{- $scheme := default "HTTP" .scheme }}
startup: {httpGet: {path: {{ .live | quote }}, port: {{ $port }}, scheme: {{ $scheme }}}, periodSeconds: 2, timeoutSeconds: 5, failureThreshold: 90}
readiness: {httpGet: {path: {{ default .live .ready | quote }}, port: {{ $port }}, scheme: {{ $scheme }}}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 3}
liveness: {httpGet: {path: {{ .live | quote }}, port: {{ $port }}, scheme: {{ $scheme }}}, periodSeconds: 15, timeoutSeconds: 5, failureThreshold: 6}
{{- end -}}
