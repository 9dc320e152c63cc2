{{/* PostgreSQL, NATS and MinIO for trials: rows of the table of components. */}}
{{- define "noetl.trialComponents" -}}
{{- $full := include "noetl.fullname" . }}
{{- $secret := printf "%s-trial" $full }}
{{- with .Values.postgresql }}{{ if .enabled }}
postgresql:
  kind: StatefulSet
  values: {{ toJson . }}
  replicas: 1
  image: {{ .image | quote }}
  user: 999
  role: trial
  grace: 120
  args: [postgres, -c, max_connections=300]
  ports: {postgresql: 5432}
  service: true
  probes:
    startup: {exec: {command: [pg_isready, -h, 127.0.0.1, -U, noetl, -d, dagster]}, periodSeconds: 2, timeoutSeconds: 5, failureThreshold: 90}
    readiness: {exec: {command: [pg_isready, -h, 127.0.0.1, -U, noetl, -d, noetl]}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 3}
    liveness: {exec: {command: [pg_isready, -h, 127.0.0.1, -U, noetl, -d, noetl]}, periodSeconds: 15, timeoutSeconds: 5, failureThreshold: 6}
  env: {POSTGRES_USER: noetl, POSTGRES_DB: noetl, PGDATA: /var/lib/postgresql/data/pgdata}
  fromSecret: {POSTGRES_PASSWORD: {name: {{ $secret }}, key: postgresql-password}}
  scratch: [/tmp, /var/run/postgresql]
  files: {configMap: {{ $full }}-postgresql, path: /docker-entrypoint-initdb.d}
  data: {path: /var/lib/postgresql/data, size: {{ .size | quote }}, storageClass: {{ .storageClass | quote }}}
  reaches: []
{{- end }}{{ end }}
{{- with .Values.nats }}{{ if .enabled }}
nats:
  kind: StatefulSet
  values: {{ toJson . }}
  replicas: 1
  image: {{ .image | quote }}
  user: 10001
  role: trial
  grace: 60
  args: [--config, /etc/nats/nats.conf]
  ports: {nats: 4222, monitor: 8222}
  service: true
  probes: {{- include "noetl.httpProbes" (dict "live" "/healthz?js-enabled-only=true" "ready" "/healthz?js-server-only=true" "port" "monitor") | nindent 4 }}
  fromSecret: {NATS_PASSWORD: {name: {{ $secret }}, key: nats-password}}
  scratch: [/tmp]
  files: {configMap: {{ $full }}-nats, path: /etc/nats}
  data: {path: /data, size: {{ .size | quote }}, storageClass: {{ .storageClass | quote }}}
  reaches: []
{{- end }}{{ end }}
{{- with .Values.minio }}{{ if .enabled }}
minio:
  kind: StatefulSet
  values: {{ toJson . }}
  replicas: 1
  image: {{ .image | quote }}
  user: 10001
  role: trial
  grace: 60
  args: [server, /data, --console-address, ":9001"]
  ports: {minio: 9000, console: 9001}
  service: true
  probes: {{- include "noetl.httpProbes" (dict "live" "/minio/health/live" "ready" "/minio/health/ready" "port" "minio") | nindent 4 }}
  env: {MINIO_CONFIG_DIR: /tmp/minio}
  fromSecret:
    MINIO_ROOT_USER: {name: {{ $secret }}, key: NOETL_MINIO_ACCESS_KEY}
    MINIO_ROOT_PASSWORD: {name: {{ $secret }}, key: NOETL_MINIO_SECRET_KEY}
  scratch: [/tmp]
  data: {path: /data, size: {{ .size | quote }}, storageClass: {{ .storageClass | quote }}}
  reaches: []
{{- end }}{{ end }}
{{- end -}}

{{- define "noetl.files.postgresql" -}}
dagster.sql: CREATE DATABASE dagster OWNER noetl;
{{- end -}}

{{- define "noetl.files.nats" -}}
nats.conf: |
  port: 4222
  http_port: 8222
  max_payload: 8MB
  lame_duck_duration: 30s
  lame_duck_grace_period: 10s
  jetstream { store_dir: /data }
  authorization { user: noetl, password: $NATS_PASSWORD }
{{- end -}}
