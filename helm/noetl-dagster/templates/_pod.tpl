{{/*
The pod of a component, as a template of a workload or a Job. Arguments: root, name, component, and restart for Jobs.
Pods that Dagster launches get the same variables, volumes and mounts from dagster.yaml.
*/}}
{{- define "noetl.pod" -}}
{{- $root := .root }}
{{- $component := .component }}
{{- $pod := include "noetl.map" (list "noetl.podValues" .) | fromJson -}}
metadata:
  labels: {{- include "noetl.podLabels" (dict "root" $root "name" .name "pod" $pod) | nindent 4 }}
  annotations:
    {{- with include "noetl.secretSums" (dict "root" $root "component" $component) }}
    checksum/secrets: {{ sha256sum . }}
    {{- end }}
    {{- if $component.settings }}
    checksum/settings: {{ include "noetl.settings" $root | sha256sum }}
    {{- end }}
    {{- if $component.dagster }}
    checksum/dagster: {{ include "noetl.dagsterYaml" $root | sha256sum }}
    {{- end }}
    {{- if $component.workspace }}
    checksum/workspace: {{ include "noetl.workspaceYaml" $root | sha256sum }}
    {{- end }}
    {{- if $component.playbooks }}
    checksum/playbooks: {{ toJson $root.Values.playbooks | sha256sum }}
    {{- end }}
    {{- with $component.files }}
    checksum/files: {{ include (printf "noetl.files.%s" $.name) $root | sha256sum }}
    {{- end }}
    {{- with include "noetl.map" (list "noetl.podAnnotations" (dict "root" $root "component" $component "pod" $pod)) | fromJson }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with .restart }}
  restartPolicy: {{ . }}
  {{- end }}
  serviceAccountName: {{ include "noetl.serviceAccount" (dict "root" $root "role" $component.role) | quote }}
  automountServiceAccountToken: {{ default false $component.token }}
  enableServiceLinks: false  # variables such as NOETL_SERVICE_HOST would be taken for settings
  securityContext: {{- include "noetl.podSecurity" (dict "component" $component "pod" $pod) | nindent 4 }}
  {{- $graceful := set (deepCopy $pod) "gracePeriodSeconds" (coalesce $pod.gracePeriodSeconds $component.grace 30) }}
  {{- include "noetl.placement" (dict "root" $root "name" .name "pod" $graceful) | trim | nindent 2 }}
  containers:
    - name: {{ $component.kind | eq "StatefulSet" | ternary .name "main" }}
      image: {{ default (include "noetl.image" $root) $component.image | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- with $component.command }}
      command: {{ toJson . }}
      {{- end }}
      {{- with $component.args }}
      args: {{ toJson . }}
      {{- end }}
      securityContext: {{- include "noetl.containerSecurity" . | nindent 8 }}
      {{- with $component.ports }}
      ports:
        {{- range $port, $number := . }}
        - {name: {{ $port }}, containerPort: {{ $number }}}
        {{- end }}
      {{- end }}
      {{- with include "noetl.list" (list "noetl.environmentFrom" (dict "root" $root "component" $component "pod" $pod)) | fromJsonArray }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      env: {{- include "noetl.list" (list "noetl.environment" (dict "root" $root "component" $component "pod" $pod)) | fromJsonArray | toYaml | nindent 8 }}
      resources: {{- include "noetl.resources" (list $component.values.resources $pod) | nindent 8 }}
      {{- range $probe, $what := include "noetl.map" (list "noetl.overlay" (list (default dict $component.probes) $pod.probes)) | fromJson }}
      {{- with $what }}
      {{ $probe }}Probe: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- end }}
      {{- if $component.lingers }}
      lifecycle:
        preStop: {exec: {command: [sleep, "5"]}}  # until every node has heard that it goes
      {{- end }}
      volumeMounts: {{- include "noetl.list" (list "noetl.mounts" (dict "root" $root "component" $component "pod" $pod)) | fromJsonArray | toYaml | nindent 8 }}
    {{- if and $component.kind $pod.extraContainers }}
    {{- toYaml $pod.extraContainers | nindent 4 }}
    {{- end }}
  volumes: {{- include "noetl.list" (list "noetl.volumes" (dict "root" $root "component" $component "pod" $pod)) | fromJsonArray | toYaml | nindent 4 }}
{{- end -}}

{{/* Resources with the ephemeral storage that pods have: a list of the resources and of what values say of the pod. */}}
{{- define "noetl.resources" -}}
{{- $resources := deepCopy (first .) | default dict }}
{{- with (last .).ephemeralStorage }}
{{- $disk := dict "ephemeral-storage" . }}
{{- $resources = merge $resources (dict "requests" $disk "limits" $disk) }}
{{- end }}
{{- toYaml $resources }}
{{- end -}}

{{/* What the Secrets of a component hold, where Helm can read them: a change replaces its pods at the next upgrade. */}}
{{- define "noetl.secretSums" -}}
{{- range include "noetl.list" (list "noetl.secretVariables" (dict "root" .root "names" .component.secrets)) | fromJsonArray }}
{{- $name := .valueFrom.secretKeyRef.name }}
{{- if not (hasSuffix "-trial" $name) }}{{ with lookup "v1" "Secret" $.root.Release.Namespace $name }}{{ toJson .data }}{{ end }}{{ end }}
{{- end }}
{{- end -}}

{{/* What selects the pods of a component, then what values say of them. */}}
{{- define "noetl.podLabels" -}}
{{- $own := include "noetl.map" (list "noetl.selector" .) | fromJson }}
{{- merge $own (default dict .pod.labels) .root.Values.commonLabels | toYaml }}
{{- end -}}

{{/* Annotations of a component's pods; nothing without any. GKE mounts gcsfuse volumes only where one says so. */}}
{{- define "noetl.podAnnotations" -}}
{{- $shared := .root.Values.storage.pvc }}
{{- $annotations := dict }}
{{- if and .component.shared $shared.enabled (eq (dig "csi" "driver" "" $shared.volume) "gcsfuse.csi.storage.gke.io") }}
{{- $_ := set $annotations "gke-gcsfuse/volumes" "true" }}
{{- end }}
{{- with merge (deepCopy (default dict .pod.annotations)) $annotations }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/* What a component says of its pods, on top of what all say. */}}
{{- define "noetl.podValues" -}}
{{- include "noetl.overlay" (list .root.Values.pod (default dict .component.values.pod)) -}}
{{- end -}}

{{/* What values say of users, without what is null; an image with a user of its own has that, unless its values say another. */}}
{{- define "noetl.podSecurity" -}}
{{- $stated := default dict (default dict .component.values.pod).securityContext }}
{{- $security := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- range $field, $value := .pod.securityContext }}
{{- if not (kindIs "invalid" $value) }}
{{- $others := and $.component.user (has $field (list "runAsUser" "runAsGroup" "fsGroup")) (not (hasKey $stated $field)) }}
{{- $_ := set $security $field (ternary $.component.user $value (not (empty $others))) }}
{{- end }}
{{- end }}
{{- toYaml $security }}
{{- end -}}

{{- define "noetl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where pods of a component go. */}}
{{- define "noetl.placement" -}}
{{- $placement := dict }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" "dnsConfig" "hostAliases" "initContainers" }}
{{- with get $.pod $field }}{{ $_ := set $placement $field . }}{{ end }}
{{- end }}
{{- with .pod.gracePeriodSeconds }}{{ $_ := set $placement "terminationGracePeriodSeconds" (int64 .) }}{{ end }}
{{- with .root.Values.image.pullSecrets }}{{ $_ := set $placement "imagePullSecrets" . }}{{ end }}
{{- if $placement }}
{{- toYaml $placement }}
{{- end }}
{{- with .pod.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml . | nindent 4 | trim }}
    labelSelector:
      matchLabels: {{- include "noetl.selector" (dict "root" $.root "name" $.name) | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "noetl.environmentFrom" -}}
{{- if .component.settings }}
- configMapRef: {name: {{ include "noetl.fullname" .root }}-{{ default "settings" .component.settingsMap }}}
{{- end }}
{{- with .pod.extraEnvFrom }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "noetl.environment" -}}
{{- $root := .root }}
{{- if .component.dagster }}
- {name: DAGSTER_HOME, value: /opt/noetl/dagster}
{{- end }}
{{- range $name, $value := .component.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- range $name, $entry := .component.fromSecret }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {{ toJson $entry }}}
{{- end }}
{{- if and .component.serverCa (include "noetl.serverCa" $root) }}
- {name: NOETL_SERVER_CA, value: /opt/noetl/server-ca/ca.crt}
{{- end }}
{{- include "noetl.secretVariables" (dict "root" $root "names" .component.secrets) }}
{{- if .component.tools }}
{{- include "noetl.sparkVariables" $root }}
{{- end }}
{{- with .pod.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "noetl.mounts" -}}
{{- $values := .root.Values }}
{{- if .component.scratch }}
{{- range $index, $path := .component.scratch }}
- {name: scratch-{{ $index }}, mountPath: {{ $path }}}
{{- end }}
{{- else }}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /var/lib/noetl}
{{- end }}
{{- if .component.dagster }}
- {name: dagster-yaml, mountPath: /opt/noetl/dagster, readOnly: true}
{{- end }}
{{- if .component.workspace }}
- {name: workspace, mountPath: /opt/noetl/workspace, readOnly: true}
{{- end }}
{{- if and .component.playbooks (include "noetl.playbooksVolume" .root) }}
- {name: playbooks, mountPath: /opt/noetl/playbooks, readOnly: true}
{{- end }}
{{- if and .component.shared $values.storage.pvc.enabled }}
- {name: shared, mountPath: {{ $values.storage.pvc.mountPath | quote }}}
{{- end }}
{{- if and .component.tools (eq $values.spark.mode "kubernetes") }}
- {name: spark, mountPath: /opt/noetl/spark, readOnly: true}
{{- end }}
{{- if .component.tls }}
- {name: tls, mountPath: /opt/noetl/tls, readOnly: true}
{{- end }}
{{- if and .component.serverCa (include "noetl.serverCa" .root) }}
- {name: server-ca, mountPath: /opt/noetl/server-ca, readOnly: true}
{{- end }}
{{- with .component.files }}
- {name: files, mountPath: {{ .path }}, readOnly: true}
{{- end }}
{{- with .component.data }}
- {name: data, mountPath: {{ .path }}}
{{- end }}
{{- with .pod.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "noetl.volumes" -}}
{{- $values := .root.Values }}
{{- $full := include "noetl.fullname" .root }}
{{- if .component.scratch }}
{{- range $index, $path := .component.scratch }}
- {name: scratch-{{ $index }}, emptyDir: {sizeLimit: {{ $.pod.scratchSize }}}}
{{- end }}
{{- else }}
- {name: tmp, emptyDir: {sizeLimit: {{ .pod.scratchSize }}}}
- {name: home, emptyDir: {sizeLimit: {{ .pod.scratchSize }}}}
{{- end }}
{{- if .component.dagster }}
- {name: dagster-yaml, configMap: {name: {{ $full }}-{{ default "instance" .component.settingsMap }}, items: [{key: dagster.yaml, path: dagster.yaml}]}}
{{- end }}
{{- if .component.workspace }}
- {name: workspace, configMap: {name: {{ $full }}-workspace}}
{{- end }}
{{- if .component.playbooks }}
{{- with include "noetl.map" (list "noetl.playbooksVolume" .root) | fromJson }}
- name: playbooks
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $values.storage.pvc }}
{{- if and $.component.shared .enabled }}
{{- include "noetl.sharedVolume" $.root }}
{{- end }}
{{- end }}
{{- if and .component.tools (eq $values.spark.mode "kubernetes") }}
- {name: spark, configMap: {name: {{ $full }}-spark}}
{{- end }}
{{- with .component.tls }}
- {name: tls, secret: {secretName: {{ . | quote }}}}
{{- end }}
{{- if and .component.serverCa (include "noetl.serverCa" .root) }}
- {name: server-ca, secret: {secretName: {{ $values.api.tls.secretName | quote }}, items: [{key: {{ $values.api.tls.ca | quote }}, path: ca.crt}]}}
{{- end }}
{{- with .component.files }}
- {name: files, configMap: {name: {{ .configMap | quote }}}}
{{- end }}
{{- with .pod.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Whether clients of the API have to be told whom to trust. */}}
{{- define "noetl.serverCa" -}}
{{- with .Values.api }}{{ if and .enabled .tls.secretName .tls.ca }}true{{ end }}{{ end -}}
{{- end -}}

{{/* The volume that playbooks come from; nothing: the image has them. */}}
{{- define "noetl.playbooksVolume" -}}
{{- with .Values.playbooks -}}
{{- if .volume -}}
{{ toYaml .volume }}
{{- else if .configMap -}}
configMap: {name: {{ .configMap | quote }}}
{{- else if .files -}}
configMap: {name: {{ include "noetl.fullname" $ }}-playbooks}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The volume of the tier pvc. */}}
{{- define "noetl.sharedVolume" }}
- name: shared
  {{- with .Values.storage.pvc }}
  {{- if .volume }}
  {{- toYaml .volume | nindent 2 }}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ default (printf "%s-shared" (include "noetl.fullname" $)) .existingClaim | quote }}}
  {{- end }}
  {{- end }}
{{- end -}}
