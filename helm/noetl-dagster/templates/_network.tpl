{{/* What a component may be reached by and may reach. */}}
{{- define "noetl.policy" -}}
{{- if .root.Values.networkPolicy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{- include "noetl.metadata" (dict "root" .root "name" .name "annotations" .annotations) | nindent 2 }}
spec:
  podSelector:
    matchLabels: {{- include "noetl.selector" (dict "root" .root "name" .name) | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress: {{- include "noetl.list" (list "noetl.ingressRules" .) | fromJsonArray | toYaml | nindent 4 }}
  egress: {{- include "noetl.list" (list "noetl.egressRules" .) | fromJsonArray | toYaml | nindent 4 }}
{{- if and .root.Values.networkPolicy.cilium (has "kubernetes" (get .components .name).reaches) }}
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{- include "noetl.metadata" (dict "root" .root "name" .name "annotations" .annotations) | nindent 2 }}
spec:
  endpointSelector:
    matchLabels: {{- include "noetl.selector" (dict "root" .root "name" .name) | nindent 6 }}
  egress:
    - toEntities: [kube-apiserver]
{{- end }}
{{- end }}
{{- end -}}

{{/* What a component connects to: components, and outside services by the name of their value in networkPolicy. */}}
{{- define "noetl.reached" -}}
{{- $names := list }}
{{- range .component.reaches }}
{{- if and (eq . "objects") $.root.Values.minio.enabled }}{{ $names = append $names "minio" }}{{ end }}
{{- $names = append $names . }}
{{- end }}
{{- toYaml $names }}
{{- end -}}

{{/* In one order: values of a mapping come in any. */}}
{{- define "noetl.policyPorts" -}}
{{- range sortAlpha . }}
- {protocol: TCP, port: {{ int . }}}
{{- end }}
{{- end -}}

{{/* Who may connect to a component: those whose reaches name it, and peers that values name. */}}
{{- define "noetl.ingressRules" -}}
{{- $policy := .root.Values.networkPolicy }}
{{- $component := get .components .name }}
{{- $ports := values (default dict $component.ports) }}
{{- $callers := list }}
{{- range $other, $caller := .components }}
{{- if has $.name (include "noetl.list" (list "noetl.reached" (dict "root" $.root "component" $caller)) | fromJsonArray) }}{{ $callers = append $callers $other }}{{ end }}
{{- end }}
{{- if and $ports $callers }}
- from:
    {{- range $callers }}
    - podSelector:
        matchLabels: {{- include "noetl.selector" (dict "root" $.root "name" .) | nindent 10 }}
    {{- end }}
  ports: {{- include "noetl.policyPorts" $ports | indent 4 }}
{{- end }}
{{- $peers := list }}
{{- if has .name (list "webserver" "api") }}{{ $peers = $policy.ingressFrom }}{{ end }}
{{- if eq $component.role "trial" }}{{ $peers = $policy.servicesFrom }}{{ end }}
{{- with $peers }}
- from: {{- toYaml . | nindent 4 }}
  ports: {{- include "noetl.policyPorts" $ports | indent 4 }}
{{- end }}
{{- with (default dict $component.ports) }}
{{- $metrics := .health | default (ternary .api nil (eq $.name "api")) }}
{{- if and $metrics $policy.monitoringFrom }}
- from: {{- toYaml $policy.monitoringFrom | nindent 4 }}
  ports: {{- include "noetl.policyPorts" (list $metrics) | indent 4 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where a component may connect to. Without peers in `to`, its ports are open everywhere. */}}
{{- define "noetl.egressRules" -}}
{{- $outside := set (deepCopy .root.Values.networkPolicy) "locations" (include "noetl.map" (list "noetl.locations" .root) | fromJson) }}
{{- if $outside.cilium }}{{ $_ := unset $outside "kubernetes" }}{{ end }}
{{- range $target := include "noetl.list" (list "noetl.reached" (dict "root" .root "component" (get .components .name))) | fromJsonArray }}
{{- with get $.components $target }}
{{- if .ports }}
- to:
    - podSelector:
        matchLabels: {{- include "noetl.selector" (dict "root" $.root "name" $target) | nindent 10 }}
  ports: {{- include "noetl.policyPorts" (values .ports) | indent 4 }}
{{- end }}
{{- else with get $outside $target }}
{{- $rule := dict }}
{{- with .to }}{{ $_ := set $rule "to" . }}{{ end }}
{{- with .ports }}
{{- $ports := concat . (include "noetl.list" (list "noetl.addressPorts" (dict "root" $.root "target" $target)) | fromJsonArray) | uniq }}
{{- $_ := set $rule "ports" (include "noetl.list" (list "noetl.policyPorts" $ports) | fromJsonArray) }}
{{- end }}
- {{ toJson $rule }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Ports that values name in an address: of the object store, of the collector. */}}
{{- define "noetl.addressPorts" -}}
{{- $address := get (dict "objects" .root.Values.storage.minio.endpoint "tracing" .root.Values.tracing.endpoint) .target }}
{{- if $address }}
{{- $url := urlParse $address }}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary 443 80 (eq $url.scheme "https") | toString) }}
- {{ $port }}
{{- else -}}
[]
{{- end }}
{{- end -}}

{{/* The code locations of others, as an outside service; nothing without any. */}}
{{- define "noetl.locations" -}}
{{- with .Values.dagster.extraLocations }}
to: {{ toJson $.Values.networkPolicy.locations.to }}
ports:
  {{- range . }}
  - {{ int .port }}
  {{- end }}
{{- end }}
{{- end -}}
