{{- define "tidegate.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "tidegate.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tidegate.labels" -}}
{{ include "tidegate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "tidegate.advertisedHost" -}}
{{- .Values.listener.advertisedHost | default (printf "%s.%s.svc.cluster.local" (include "tidegate.name" .) .Release.Namespace) }}
{{- end }}

{{/* The scheme of the admin port. The port has TLS if `settings` have a line [admin.tls]. */}}
{{- define "tidegate.adminScheme" -}}
{{- if regexMatch "(?m)^\\s*\\[admin\\.tls\\]" .Values.settings }}https{{ else }}http{{ end }}
{{- end }}

{{- define "tidegate.testSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
