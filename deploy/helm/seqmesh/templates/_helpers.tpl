{{- /* Services have names without a dot, which begin with a letter. The name of the StatefulSet, with `-redis`, is a part of a label of its pods,
       and has 52 characters at most. */}}
{{- define "seqmesh.name" -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $name }}{{ $name = printf "seqmesh-%s" $name }}{{ end -}}
{{- if contains "seqmesh" $name }}{{ $name | trunc 46 | trimSuffix "-" }}{{ else }}{{ $name | trunc 38 | trimSuffix "-" }}-seqmesh{{ end }}
{{- end }}

{{- /* Refuses bounds of which the lower is the greater; argument: (list name-of-the-values autoscaling). */}}
{{- define "seqmesh.bounds" -}}
{{- $scaling := index . 1 }}
{{- if gt (int $scaling.min) (int $scaling.max) }}
{{- fail (printf "%s.autoscaling.min is greater than max" (index . 0)) }}
{{- end }}
{{- end }}

{{- /* What never changes of an object's labels; argument: (list root component). */}}
{{- define "seqmesh.selector" -}}
app.kubernetes.io/name: seqmesh
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- /* name, namespace and labels of a component's object; argument: (list root component). */}}
{{- define "seqmesh.metadata" -}}
name: {{ include "seqmesh.name" (index . 0) }}-{{ index . 1 }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "seqmesh.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
{{- end }}

{{- define "seqmesh.redisSecret" -}}
{{ .Values.redis.secretName | default (printf "%s-redis" (include "seqmesh.name" .)) }}
{{- end }}

{{- /* Whether Redis serves, by the Secret's password or by the one that Redis was started with: when the Secret has changed it serves as
before, and no StatefulSet replaces a pod that is not ready. */}}
{{- define "seqmesh.redisServes" -}}
exec:
  command:
    - sh
    - -c
    - >-
      for password in "$(cat /secret/password)" "$(cut -d ' ' -f 2 /tmp/redis.conf)"; do
      REDISCLI_AUTH=$password redis-cli ping | grep -q PONG && exit; done; exit 1
{{- end }}

{{- /* The image of a service; argument: (list root component). */}}
{{- define "seqmesh.image" -}}
{{- $image := (index . 0).Values.image -}}
image: {{ $image.prefix }}seqmesh-{{ index . 1 }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end }}

{{- /* A number as it was written: Helm reads 3000000 as 3e+06. */}}
{{- define "seqmesh.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- /* The environment of a service; argument: (list root component). */}}
{{- define "seqmesh.env" -}}
{{- $root := index . 0 -}}
- name: SEQMESH_REDIS_URL_FILE
  value: /redis/url
{{- /* Not `merge`: it takes `false` and 0 for no value. */}}
{{- $settings := dict }}
{{- range $name, $value := $root.Values.settings }}{{ $_ := set $settings $name $value }}{{ end }}
{{- range $name, $value := (index $root.Values (index . 1)).settings }}{{ $_ := set $settings $name $value }}{{ end }}
{{- range $name, $value := $settings }}
- name: SEQMESH_{{ upper $name }}
  value: {{ if kindIs "slice" $value }}{{ join "," $value | quote }}{{ else }}{{ include "seqmesh.scalar" $value | quote }}{{ end }}
{{- end }}
{{- range $name, $value := $root.Values.env }}
- name: {{ $name }}
  value: {{ include "seqmesh.scalar" $value | quote }}
{{- end }}
{{- end }}

{{- define "seqmesh.mounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: redis, mountPath: /redis, readOnly: true }
{{- if .Values.redis.tlsSecretName }}
- { name: redis-tls, mountPath: /redis-tls, readOnly: true }
{{- end }}
{{- end }}

{{- /* Volumes of every service; argument: (list root sizeOfTmp). */}}
{{- define "seqmesh.volumes" -}}
{{- $root := index . 0 -}}
- name: tmp
  emptyDir: { sizeLimit: {{ index . 1 }} }
- name: redis
  secret:
    secretName: {{ include "seqmesh.redisSecret" $root }}
    items: [{ key: url, path: url }]
{{- with $root.Values.redis.tlsSecretName }}
- name: redis-tls
  secret: { secretName: {{ . }} }
{{- end }}
{{- end }}

{{- /* What every pod has in common, that of Redis too; argument: (list root values-of-the-component). */}}
{{- define "seqmesh.anyPod" -}}
serviceAccountName: {{ include "seqmesh.name" (index . 0) }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with (index . 0).Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" }}
{{- with index (index $ 1) $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- /* What every pod of a service has in common; argument: (list root component). */}}
{{- define "seqmesh.pod" -}}
{{- $root := index . 0 -}}
{{ include "seqmesh.anyPod" (list $root (index $root.Values (index . 1))) }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: { type: RuntimeDefault }
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "seqmesh.selector" . | nindent 8 }}
{{- end }}

{{- define "seqmesh.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{- /* Labels and annotations of a pod; argument: (list root component values-of-the-component). */}}
{{- define "seqmesh.podMetadata" -}}
{{- $values := index . 2 -}}
{{- $selector := include "seqmesh.selector" . -}}
{{- range $name := keys $values.podLabels }}
{{- if hasKey (fromYaml $selector) $name }}
{{- fail (printf "%s.podLabels: %s is the chart's own, by which the pods are found: leave it out" (index $ 1) $name) }}
{{- end }}
{{- end -}}
labels:
  {{- $selector | nindent 2 }}
{{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $annotations := deepCopy $values.podAnnotations }}
{{- /* A service reads the URL at its start: with another one every pod is another. */}}
{{- with (index . 0).Values.redis.url }}{{ $_ := set $annotations "checksum/redis-url" (sha256sum .) }}{{ end }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The probes of a service that has no port; argument: (list name secondsToStart). A check is a Python that starts, half a second of
CPU, and asks Redis. `healthcheck` fails while Redis is away, `livecheck` does not: it is no remedy to start everything
again. */}}
{{- define "seqmesh.checks" -}}
startupProbe:
  exec: { command: [python, -m, {{ index . 0 }}, healthcheck] }
  periodSeconds: 5
  timeoutSeconds: 20
  failureThreshold: {{ int64 (ceil (divf (index . 1) 5)) }}
readinessProbe:
  exec: { command: [python, -m, {{ index . 0 }}, healthcheck] }
  periodSeconds: 30
  timeoutSeconds: 20
livenessProbe:
  exec: { command: [python, -m, {{ index . 0 }}, livecheck] }
  periodSeconds: 60
  timeoutSeconds: 20
  failureThreshold: 3
{{- end }}
