{{- define "paddock.labels" -}}
app.kubernetes.io/name: paddock
app.kubernetes.io/part-of: paddock
{{- end }}

{{- define "paddock.env" -}}
{{- $inside := printf "%s.svc" .root.Release.Namespace }}
{{- $env := dict
  "PADDOCK_STORE" "kubernetes"
  "PADDOCK_RUNTIME" "kubernetes"
  "PADDOCK_AGENT_IMAGE" .root.Values.image
  "PADDOCK_SYSTEM_NAMESPACE" .root.Release.Namespace
  "PADDOCK_STATE_DIR" "/tmp"
  "PADDOCK_LOG_JSON" "true"
  "PADDOCK_API_HOST" (eq .role "gateway" | ternary (printf "paddock-api.%s" $inside) "0.0.0.0")
  "PADDOCK_API_PORT" "3001" }}
{{- if eq .role "api" }}
{{- $_ := merge $env (dict
  "PADDOCK_API_PEERS" (printf "dns:paddock-api-replicas.%s:3001" $inside)
  "PADDOCK_AUDIT_LOG" "stdout") }}
{{- end }}
{{- if or (eq .role "gateway") (eq .role "controllers") }}
{{- $_ := set $env "PADDOCK_PEERS" (printf "dns:paddock-gateway-peers.%s:3002" $inside) }}
{{- end }}
{{- if eq .role "gateway" }}
{{- $_ := merge $env (dict
  "PADDOCK_HOST" "0.0.0.0"
  "PADDOCK_PORT" "3000"
  "PADDOCK_ADMIN_PORT" "3002") }}
{{- end }}
{{- if and (eq .role "gateway") .root.Values.tls.enabled }}
{{- $_ := merge $env (dict
  "PADDOCK_TLS_CERTIFICATE" "/etc/paddock/tls/tls.crt"
  "PADDOCK_FRONT_PORT" "3004") }}
{{- end }}
{{- if and (eq .role "api") .root.Values.webhook.enabled }}
{{- $_ := merge $env (dict
  "PADDOCK_WEBHOOK_CERTIFICATE" "/etc/paddock/webhook/tls.crt"
  "PADDOCK_WEBHOOK_KEY" "/etc/paddock/webhook/tls.key"
  "PADDOCK_WEBHOOK_PORT" "3003") }}
{{- end }}
{{- range $name, $value := mergeOverwrite $env .root.Values.settings }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- if and (eq .role "gateway") (not (hasKey .root.Values.settings "PADDOCK_ADMIN_HOST")) }}
- name: PADDOCK_ADMIN_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
- name: PADDOCK_SEED
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret.name }}, key: seed}}
- name: PADDOCK_ACCEPTED_SEEDS
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret.name }}, key: accepted-seeds, optional: true}}
- name: PADDOCK_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret.name }}, key: token}}
{{- if eq .role "api" }}
- name: PADDOCK_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret.name }}, key: api-key}}
{{- end }}
{{- end }}

{{- define "paddock.container" -}}
{{- $probed := dict "controllers" 3001 "api" 3001 "gateway" 3002 "node" 49985 }}
name: {{ .role }}
image: {{ .root.Values.image }}
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
args: [{{ .role }}]
env:
{{- include "paddock.env" . | nindent 2 }}
ports:
{{- if eq .role "gateway" }}
  - {name: traffic, containerPort: 3000}
  - {name: admin, containerPort: 3002}
{{- else if eq .role "node" }}
  - {name: orders, containerPort: 49985}
{{- else }}
  - {name: http, containerPort: 3001}
{{- if and (eq .role "api") .root.Values.webhook.enabled }}
  - {name: webhook, containerPort: 3003}
{{- end }}
{{- end }}
readinessProbe:
  httpGet: {path: {{ eq .role "node" | ternary "/healthz" "/readyz" }}, port: {{ get $probed .role }}}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /healthz, port: {{ get $probed .role }}}
  periodSeconds: 10
  failureThreshold: 6
resources: {{ (get .root.Values .role).resources | toJson }}
{{- if or (eq .role "api") (eq .role "gateway") }}
# A terminating pod gets new connections until every node has updated its endpoints.
lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}
{{- end }}
{{- end }}

{{- define "paddock.placing" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- end }}
