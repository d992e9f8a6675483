{{- define "prefixfleet.labels" -}}
app.kubernetes.io/name: prefixfleet
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "prefixfleet.selector" -}}
app.kubernetes.io/name: prefixfleet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "prefixfleet.secret" -}}
{{ .Values.existingSecret | default (printf "%s-secrets" .Release.Name) }}
{{- end }}

{{- define "prefixfleet.redis" -}}
{{ .Values.redis.url | default (printf "redis://%s-redis:6379/0" .Release.Name) }}
{{- end }}

{{- define "prefixfleet.secretEnv" -}}
- name: PREFIXFLEET_FLEET_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "prefixfleet.secret" . }}, key: fleet-secret}}
- name: PREFIXFLEET_INTERNAL_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "prefixfleet.secret" . }}, key: internal-token}}
- name: PREFIXFLEET_ADMIN_KEY
  valueFrom: {secretKeyRef: {name: {{ include "prefixfleet.secret" . }}, key: admin-key}}
{{- end }}

{{- define "prefixfleet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "prefixfleet.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "prefixfleet.scheme" -}}
{{ if .Values.gateway.tls.secretName }}https{{ else }}http{{ end }}
{{- end }}

{{- /* A probe shows no certificate; the admin listener asks for none. */ -}}
{{- define "prefixfleet.probe" -}}
port: {{ if .Values.gateway.tls.clientCA }}admin{{ else }}http{{ end }}, scheme: {{ include "prefixfleet.scheme" . | upper }}
{{- end }}
