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

{{/* Where a component may connect to. */}}
{{- define "noetl.egressRules" -}}
{{- $outside := set (deepCopy .root.Values.networkPolicy) "locations" (include "noetl.map" (list "noetl.locations" .root) | fromJson) }}
{{- range $target := include "noetl.list" (list "noetl.reached" (dict "root" .root "component" (get .components .name))) | fromJsonArray }}
{{- with get $.components $target }}
{{- if .ports }}
- to:
    - podSelector:
        matchLabels: {{- include "noetl.selector" (dict "root" $.root "name" $target) | nindent 10 }}
  ports: {{- include "noetl.policyPorts" (values .ports) | indent 4 }}
{{- end }}
{{- else with get $outside $target }}
{{- $except := .except }}
- to: {{- range $cidr := .cidrs }}
    - ipBlock: {cidr: {{ $cidr | quote }}
        {{- with include "noetl.list" (list "noetl.exceptions" (dict "cidr" $cidr "except" $except "target" $target)) | fromJsonArray }}, except: {{ toJson . }}{{ end }}}
    {{- end }}
  {{- with .ports }}
  ports: {{- include "noetl.policyPorts" (concat . (include "noetl.list" (list "noetl.addressPorts" (dict "root" $.root "target" $target)) | fromJsonArray) | uniq) | indent 4 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The exceptions that lie in one network: Kubernetes refuses others there. Arguments: cidr, except, target. */}}
{{- define "noetl.exceptions" -}}
{{- $six := contains ":" .cidr }}
{{- $length := last (splitList "/" .cidr) | atoi }}
{{- range $except := .except }}
{{- if eq $six (contains ":" $except) }}
{{- $own := last (splitList "/" $except) | atoi }}
{{- $shorter := min $length $own | int }}
{{- if and $six (ne $shorter 0) (ne $except $.cidr) }}
{{- fail (printf "networkPolicy.%s.except: the chart cannot tell whether %s lies in %s; list in cidrs what stays open, or all of ::/0" $.target $except $.cidr) }}
{{- end }}
{{- if or $six (eq (include "noetl.firstBits" (list $.cidr $shorter)) (include "noetl.firstBits" (list $except $shorter))) }}
{{- if le $own $length }}
{{- fail (printf "networkPolicy.%s.except: %s leaves nothing of %s; take that out of cidrs" $.target $except $.cidr) }}
{{- end }}
- {{ quote $except }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The first bits of an address of IPv4, as a number: a list of the network and how many. */}}
{{- define "noetl.firstBits" -}}
{{- $number := 0 }}
{{- range splitList "." (first (splitList "/" (first .))) }}{{ $number = add (mul $number 256) (atoi .) }}{{ end }}
{{- range until (sub 32 (last .) | int) }}{{ $number = div $number 2 }}{{ end }}
{{- $number }}
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
cidrs: {{ toJson $.Values.networkPolicy.locations.cidrs }}
except: {{ toJson $.Values.networkPolicy.locations.except }}
ports:
  {{- range . }}
  - {{ int .port }}
  {{- end }}
{{- end }}
{{- end -}}
