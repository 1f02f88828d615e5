"""The chart: what Helm makes of it is valid, fits the services, and refuses what cannot be.

Kubernetes' own schemas judge the objects, in strict mode: a misspelt field is an error. For the three kinds that are
not Kubernetes' own there is the part of their schema that the chart uses.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, cast

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.local.embedded import held_port
from shared.checks import CHECKS
from shared.settings import parse_settings
from tests.deploy.kubernetes.chart import (
    CHART,
    RefusedValuesError,
    ask,
    containers,
    notes,
    objects,
    question_of,
    rendered,
)
from tests.deploy.kubernetes.generated import (
    ALERTS,
    MANIFESTS,
    SCHEMA,
    SETTINGS,
    alerts,
    has_bound,
    manifests,
    schema,
    settings_classes,
)
from tests.markdown_pages import ROOT, all_blocks
from tests.monitoring_files import rules

pytest.importorskip("helm_python", reason="there is no wheel of Helm for this machine")

ELSEWHERE: dict[str, Any] = {"internal": {"enabled": False}}
KEDA: dict[str, Any] = {"enabled": True, "targets": {"slotsUsed": 4, "batchFillPercent": 90}}
TO_REDIS: dict[str, Any] = {"ports": [{"port": 6379}], "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
NODES: dict[str, Any] = {
    "nodeSelector": {"pool": "mesh"},
    "tolerations": [{"key": "mesh", "operator": "Exists"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}]
            }
        }
    },
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "redis elsewhere, a Secret of one's own": {"redis": {"secretName": "ours", **ELSEWHERE}},
    "redis over TLS": {
        "redis": {"url": "rediss://:p@r:6380/0?ssl_ca_certs=/redis-tls/ca.crt", "tlsSecretName": "ca", **ELSEWHERE}
    },
    "redis behind Sentinels, over TLS": {
        "redis": {"url": "rediss+sentinel://u:p@s1,s2,s3:26380/main/0?sentinel_tls=yes", **ELSEWHERE}
    },
    "a Redis Cluster": {"redis": {"url": "redis+cluster://u:p@n1,n2,n3:6380", **ELSEWHERE}},
    "GPUs": {
        "executor": {
            "gpus": 2,
            "runtimeClassName": "nvidia",
            "maxSurge": 0,
            "startupSeconds": 5_000_001,
            "settings": {"gpu": "0,1"},
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        }
    },
    "models elsewhere": {
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}},
        "executor": {"models": ["s3://bucket/a", "gs://b"], "modelsVolume": None, "envSecretNames": ["keys"]},
    },
    "autoscaling by KEDA": {"executor": {"autoscaling": KEDA}, "gateway": {"autoscaling": {"enabled": True}}},
    "autoscaling by HPA": {"executor": {"autoscaling": {"enabled": True, "kind": "hpa"}}},
    "each service on nodes of its own": {
        **dict.fromkeys(("gateway", "scheduler", "executor"), NODES),
        "console": {"enabled": True, **NODES},
        "redis": {"internal": NODES},
    },
    "pods with labels and annotations": {
        "gateway": {"podLabels": {"team": "speech", "on": "true"}, "podAnnotations": {"a.example.com/b": "c"}},
        "scheduler": {"podLabels": {"app.kubernetes.io/part-of": "speech"}},
        "executor": {"podLabels": {"team": "speech"}},
        "console": {"enabled": True, "podLabels": {"team": "speech"}},
        "redis": {"internal": {"podLabels": {"team": "speech"}, "podAnnotations": {"a.example.com/b": "c"}}},
    },
    "watched and closed": {
        "console": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicies": {"enabled": True, "clients": [{"podSelector": {}}], "monitoring": [{"podSelector": {}}]},
    },
    "closed, redis elsewhere": {"redis": ELSEWHERE, "networkPolicies": {"enabled": True, "egress": [TO_REDIS]}},
    "TLS, restricted, settings of every kind": {
        "settings": {"log_format": "json", "tombstone_seconds": 5_000_000, "redis_timeout_ms": 2500},
        "env": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_TRACES_SAMPLER_ARG": 0.25},
        "gateway": {
            "tlsSecretName": "cert",
            "restrictedApiSecretName": "restricted",
            "probeHeaders": [{"name": "x-key", "value": "v"}],
            "settings": {
                "exit_timeout_secs": 12.5,
                "strict_readiness": False,
                "http_allowed_origin": ["https://a.example.com", "https://b.example.com"],
                "memory_max": "1GiB",
                "log_format": "text",
            },
            "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
        },
        "executor": {"settings": {"drain_timeout_s": 0.5}},
        "image": {"prefix": "registry.example.com/team/", "tag": "1.2.3", "pullSecrets": ["pull"]},
    },
    "IPv6 alone": {"gateway": {"settings": {"host": "::"}}, "console": {"enabled": True, "settings": {"host": "::"}}},
    "as little as can be": {"podDisruptionBudgets": False, "gateway": {"replicas": 1, "preStopSeconds": 0}},
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 3}, "replicas"),
    ({"gateway": {"settings": {"request_timeout": 5}}}, "request_timeout"),
    ({"gateway": {"settings": {"max_requests_in_flight": 0}}}, "max_requests_in_flight"),
    ({"gateway": {"settings": {"restricted_api": ["trace:key=secret"]}}}, "restricted_api"),
    ({"gateway": {"settings": {"http_port": 9000}}}, "http_port"),
    ({"executor": {"settings": {"name": "one"}}}, "name"),
    ({"executor": {"settings": {"drain_timeout_s": "10s"}}}, "drain_timeout_s"),
    ({"settings": {"redis_url": "redis://elsewhere"}}, "redis_url"),
    ({"env": {"SEQMESH_LOG_LEVEL": "debug"}}, "SEQMESH_LOG_LEVEL"),
    ({"redis": {"url": "redis-cluster://a", **ELSEWHERE}}, "url"),
    ({"redis": {"url": "redis://a"}}, "redis.internal.enabled to false"),
    ({"executor": {"autoscaling": {"enabled": True, "kind": "hpa", "targets": {"batchFillPercent": 9}}}}, "keda"),
    ({"gateway": {"autoscaling": {"enabled": True, "min": 5, "max": 2}}}, "gateway.autoscaling.min is greater"),
    ({"executor": {"autoscaling": {"enabled": True, "min": 5, "max": 2}}}, "executor.autoscaling.min is greater"),
    (
        {"executor": {"autoscaling": {"enabled": True, "targets": {"waitingSequences": 0, "pendingRequests": 0}}}},
        "targets are all 0",
    ),
    ({"redis": ELSEWHERE, "networkPolicies": {"enabled": True}}, "networkPolicies.egress"),
    ({"executor": {"startupSeconds": 0}}, "startupSeconds"),
    (
        {"scheduler": {"podLabels": {"app.kubernetes.io/name": "seqmesh"}}},
        "scheduler.podLabels: app.kubernetes.io/name",
    ),
    ({"gateway": {"podLabels": {"team": 7}}}, "podLabels"),
    ({"redis": {"internal": {"podLabels": {"app.kubernetes.io/component": "other"}}}}, "redis.podLabels"),
    ({"executor": {"modelsVolume": {"emptyDir": {}, "hostPath": {"path": "/"}}}}, "modelsVolume"),
    ({"prometheusRule": {"alerts": {"SeqmeshSlow": {"bound": 2}}}}, "SeqmeshSlow"),
    ({"prometheusRule": {"alerts": {"SeqmeshNoExecutor": {"bound": 2}}}}, "bound"),
]
"""Values, and words of what Helm says about them."""
DOCUMENTED: list[dict[str, Any]] = [
    yaml.safe_load(block.text)
    for block in all_blocks()
    if block.page.endswith("kubernetes.md") and block.language == "yaml" and "externalRules" not in block.text
]
"""Values that the documentation names."""
ALL = pytest.mark.parametrize("values", CASES.values(), ids=CASES)
WORKLOADS = {"Deployment", "StatefulSet"}
VERSIONS = ("1.27", kubernetes_validate.latest_version())
"""The oldest that the chart names, and the newest that is known."""


@pytest.fixture(scope="module", autouse=True)
def answers() -> None:
    """All of them at once."""
    ask(map(question_of, [*CASES.values(), *DOCUMENTED, *(values for values, _ in REFUSED)]))


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(properties), "properties": properties}


TEXT = {"type": "string", "minLength": 1}
METADATA = {"type": "object", "required": ["name", "namespace", "labels"]}
RULE = closed(
    alert=TEXT,
    expr=TEXT,
    labels=closed(severity=TEXT),
    annotations=closed(summary=TEXT, runbook=TEXT),
)
RULE["properties"]["for"] = {"type": "string", "pattern": "^[0-9]+[smh]$"}
TRIGGER = closed(
    type={"const": "prometheus"}, name=TEXT, metadata=closed(serverAddress=TEXT, query=TEXT, threshold=TEXT)
)
TRIGGER["properties"]["metricType"] = {"enum": ["AverageValue", "Value"]}
BEHAVIOUR = closed(scaleDown=closed(stabilizationWindowSeconds={"type": "integer"}))
FOREIGN = {
    "ScaledObject": closed(
        apiVersion={"const": "keda.sh/v1alpha1"},
        kind=TEXT,
        metadata=METADATA,
        spec=closed(
            scaleTargetRef=closed(name=TEXT),
            minReplicaCount={"type": "integer"},
            maxReplicaCount={"type": "integer"},
            advanced=closed(horizontalPodAutoscalerConfig=closed(behavior=BEHAVIOUR)),
            triggers={"type": "array", "minItems": 1, "items": TRIGGER},
        ),
    ),
    "PrometheusRule": closed(
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=closed(groups={"type": "array", "items": closed(name=TEXT, rules={"type": "array", "items": RULE})}),
    ),
    "ServiceMonitor": closed(
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=closed(
            selector=closed(matchLabels={"type": "object"}),
            endpoints={
                "type": "array",
                "items": closed(
                    port=TEXT,
                    path=TEXT,
                    interval=TEXT,
                    honorLabels={"type": "boolean"},
                    relabelings={"type": "array", "items": closed(targetLabel=TEXT, replacement=TEXT)},
                ),
            },
        ),
    ),
}
"""Kinds that are not Kubernetes' own: what of them the chart uses, and nothing else."""
(SCRAPED,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())["scrape_configs"]


@ALL
def test_every_object_is_valid_in_the_oldest_and_the_newest_kubernetes(values: dict[str, Any]) -> None:
    found = objects(values)

    for one in found:
        if one["kind"] in FOREIGN:
            jsonschema.validate(one, FOREIGN[one["kind"]])
        else:
            for version in VERSIONS:
                kubernetes_validate.validate(one, version, strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names)
    assert {"mesh"} == {one["metadata"]["namespace"] for one in found}


@ALL
def test_every_variable_is_a_setting_of_its_service_with_a_value_that_it_takes(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the services' own reading: of a variable that belongs to no service they say so and end."""
    for file in ("tls.crt", "tls.key", "url", "token", "restricted-api"):
        (tmp_path / file).write_text("redis://:p@seqmesh-redis:6379/0")
    (tmp_path / "token").write_text("t" * 16)
    (tmp_path / "restricted-api").write_text("trace,logging:key=value")
    for name, container in containers(objects(values)).items():
        if name not in SETTINGS:
            continue
        with monkeypatch.context() as patch:
            for variable in container["env"]:
                text = variable["value"]
                is_file = text.startswith(("/redis/", "/tls/", "/token/", "/restricted/"))
                patch.setenv(variable["name"], str(tmp_path / text.rsplit("/", 1)[1]) if is_file else text)
            settings: Any = parse_settings(SETTINGS[name], [], program=name, help="")
        given: dict[str, Any] = values.get("settings", {}) | values.get(name, {}).get("settings", {})
        expected = {key: as_read(said) for key, said in given.items()}
        expected |= {"memory_max": 1 << 30} if "memory_max" in given else {}
        assert expected == {key: getattr(settings, key) for key in given}
        assert settings.redis_url


def as_read(said: Any) -> Any:
    return tuple(cast(list[str], said)) if isinstance(said, list) else said


@ALL
def test_every_container_has_the_three_probes_and_what_they_ask_exists(values: dict[str, Any]) -> None:
    routes = (ROOT / "docs/reference/http.md").read_text() + (ROOT / "deploy/console/app.py").read_text()
    for name, container in containers(objects(values)).items():
        probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
        for probe in probes.values():
            if http := probe.get("httpGet"):
                assert f"`GET {http['path']}`" in routes or f'Route("{http["path"]}"' in routes
                assert (name == "gateway" and "tlsSecretName" in values.get("gateway", {})) == ("scheme" in http)
        if name in {"executor", "scheduler"}:
            python, module, service, check = probes["liveness"]["exec"]["command"]
            assert ("python", "-m", name) == (python, module, service)
            assert CHECKS[check], "alive, though Redis is away"
            for kind in ("startup", "readiness"):
                assert not CHECKS[probes[kind]["exec"]["command"][-1]]
            # A check waits for Redis as long as a service does.
            assert all(probe["timeoutSeconds"] > 10 for probe in probes.values())


@ALL
def test_an_executor_has_the_time_to_start_that_it_is_given(values: dict[str, Any]) -> None:
    """A model of a hundred gigabytes takes longer to load than most."""
    given = values.get("executor", {}).get("startupSeconds", 600)
    found = objects(values)
    probe = containers(found)["executor"]["startupProbe"]
    deadlines = {
        one["metadata"]["name"]: one["spec"].get("progressDeadlineSeconds", 600)
        for one in found
        if one["kind"] == "Deployment"
    }

    assert given <= probe["failureThreshold"] * probe["periodSeconds"] < given + probe["periodSeconds"]
    assert given < deadlines["seqmesh-executor"], "of a rollout"
    assert given < deadlines["seqmesh-gateway"], "which waits for executors"


@ALL
def test_nothing_is_killed_before_it_has_ended_by_itself(values: dict[str, Any]) -> None:
    found = {one["metadata"]["name"]: one for one in objects(values) if one["kind"] in WORKLOADS}
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for service, setting in {"gateway": "exit_timeout_secs", "executor": "drain_timeout_s"}.items():
        settings = values.get(service, {}).get("settings", {})
        default: Any = SETTINGS[service].__dataclass_fields__[setting].default
        pod = found[f"seqmesh-{service}"]["spec"]["template"]["spec"]
        lifecycle: dict[str, Any] = pod["containers"][0].get("lifecycle", {"preStop": {"exec": {"command": ["0"]}}})
        pre_stop: str = lifecycle["preStop"]["exec"]["command"][-1]
        margin = pod["terminationGracePeriodSeconds"] - int(pre_stop) - settings.get(setting, default)

        assert 10 <= margin < 11
        assert compose[service]["stop_grace_period"] == f"{int(default) + 10}s"
    for service in ("scheduler", "redis"):
        if pod := found.get(f"seqmesh-{service}"):
            grace = pod["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            assert f"{grace}s" == compose[service]["stop_grace_period"]


@ALL
def test_every_container_may_do_little(values: dict[str, Any]) -> None:
    found = [one for one in objects(values) if one["kind"] in WORKLOADS]
    for one in found:
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert {"type": "RuntimeDefault"} == pod["securityContext"]["seccompProfile"]
        assert not pod["automountServiceAccountToken"]
        pulled_with = [secret["name"] for secret in pod.get("imagePullSecrets", [])]
        assert values.get("image", {}).get("pullSecrets", []) == pulled_with
        claims: list[dict[str, Any]] = one["spec"].get("volumeClaimTemplates", [])
        volumes = {volume["name"] for volume in pod["volumes"]} | {claim["metadata"]["name"] for claim in claims}
        for container in pod["containers"]:
            assert {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            } == container["securityContext"]
            assert "memory" in container["resources"]["limits"]
            assert volumes == {mount["name"] for mount in container["volumeMounts"]}
            for mount in container["volumeMounts"]:
                assert mount.get("readOnly", False) == (mount["name"] not in {"tmp", "data"})


@ALL
def test_every_pod_is_of_the_service_account_that_a_cloud_may_know(values: dict[str, Any]) -> None:
    found = objects(values)
    (account,) = (one["metadata"] for one in found if one["kind"] == "ServiceAccount")

    assert values.get("serviceAccount", {}).get("annotations") == account.get("annotations")
    assert {account["name"]} == {
        one["spec"]["template"]["spec"]["serviceAccountName"] for one in found if one["kind"] in WORKLOADS
    }


def given_to(component: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of one component."""
    return values.get("redis", {}).get("internal", {}) if component == "redis" else values.get(component, {})


@ALL
def test_a_pod_runs_on_the_nodes_that_are_given(values: dict[str, Any]) -> None:
    for one in objects(values):
        if one["kind"] in WORKLOADS:
            pod = one["spec"]["template"]["spec"]
            given = given_to(pod["containers"][0]["name"], values)

            for field in NODES:
                assert given.get(field) == pod.get(field)


def test_the_alerts_of_the_chart_are_those_of_prometheus_with_the_labels_that_are_given() -> None:
    (rule,) = (one for one in objects(CASES["watched and closed"]) if one["kind"] == "PrometheusRule")

    assert rules() == [alert for group in rule["spec"]["groups"] for alert in group["rules"]]
    assert "prometheus" == rule["metadata"]["labels"]["release"]
    assert ALERTS.read_text() == alerts(), "make reference"


def test_an_alert_is_as_prometheus_has_it_but_for_what_the_values_say() -> None:
    changed = {"SeqmeshRequestsSlow": {"bound": 0.25, "for": "1m", "severity": "critical"}}
    absent = {"SeqmeshRedisKeepsNoLog": {"enabled": False}}
    values = {"prometheusRule": {"enabled": True, "alerts": changed | absent}}
    (rule,) = (one for one in objects(values) if one["kind"] == "PrometheusRule")
    found = {alert["alert"]: alert for group in rule["spec"]["groups"] for alert in group["rules"]}

    expected = {alert["alert"]: alert for alert in rules() if alert["alert"] not in absent}
    slow = expected["SeqmeshRequestsSlow"]
    slow |= {"expr": slow["expr"].removesuffix("1") + "0.25", "for": "1m", "labels": {"severity": "critical"}}
    assert expected == found


def test_only_an_alert_whose_last_comparison_decides_has_a_bound() -> None:
    bounded = {rule["alert"] for rule in rules() if has_bound(rule["expr"])}

    assert {"SeqmeshRequestsSlow", "SeqmeshStepsFail", "SeqmeshRedisMemory", "SeqmeshRedisSlow"} <= bounded
    assert bounded.isdisjoint({"SeqmeshExecutorLost", "SeqmeshNoExecutor", "SeqmeshUnreadableValues"})


@ALL
def test_who_installs_the_chart_reads_which_objects_there_are(values: dict[str, Any]) -> None:
    found = objects(values)
    said = notes(values)

    for kind, prefix in (("Service", "service/"), ("Deployment", "deploy/")):
        assert set(re.findall(rf" {prefix}(\S+)", said)) <= {
            one["metadata"]["name"] for one in found if one["kind"] == kind
        }
    secrets = {
        volume["secret"]["secretName"]
        for one in found
        if one["kind"] in WORKLOADS
        for volume in one["spec"]["template"]["spec"]["volumes"]
        if volume["name"] in {"redis", "token"}
    }
    assert secrets == set(re.findall(r"[Ss]ecret ([\w-]+)[ ,.]", said)) - {"or"}
    assert ("/#token=" in said) == values.get("console", {}).get("enabled", False)


@ALL
def test_a_pod_has_the_labels_and_annotations_that_are_given_and_no_selector_has_them(values: dict[str, Any]) -> None:
    for one in objects(values):
        if one["kind"] in WORKLOADS:
            metadata, selector = one["spec"]["template"]["metadata"], one["spec"]["selector"]["matchLabels"]
            given = given_to(selector["app.kubernetes.io/component"], values)

            assert metadata["labels"] == selector | given.get("podLabels", {})
            assert given.get("podAnnotations", {}) == {
                name: text for name, text in metadata.get("annotations", {}).items() if name != "checksum/redis-url"
            }


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no Redis on this machine's path")
def test_redis_is_ready_while_its_password_changes(tmp_path: Path) -> None:
    """In the Secret before the server or after it."""
    redis = containers(objects({}))["redis"]
    secret, port = tmp_path / "password", held_port()

    def here(script: str) -> list[str]:
        places = {"/secret/password": str(secret), "/tmp/redis.conf": f"{tmp_path}/redis.conf"}
        places |= {"/data": f"{tmp_path} --port {port}", "redis-cli": f"redis-cli -p {port}"}
        for place, own in places.items():
            script = script.replace(place, own)
        return ["sh", "-c", script]

    def passes(probe: str) -> bool:
        script = redis[f"{probe}Probe"]["exec"]["command"][-1]
        return 0 == subprocess.run(here(script), stdout=subprocess.DEVNULL, check=False, timeout=60).returncode

    secret.write_text("first")
    with subprocess.Popen(here(redis["args"][0]), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert any("Ready to accept connections" in line for line in server.stdout)
            assert passes("startup")
            secret.write_text("second")
            assert passes("readiness"), "the server has the first one alone"
            subprocess.run(here("REDISCLI_AUTH=first redis-cli config set requirepass second"), check=True, timeout=60)
            assert passes("readiness"), "the server has the second one alone"
            secret.write_text("third")
            assert not passes("readiness"), "the server has neither of those that are known"
            assert passes("liveness"), "it answers"
        finally:
            server.terminate()


def test_another_url_of_redis_in_the_values_makes_other_pods() -> None:
    """Pods that stay would be a mesh of their own, with the Redis that they began with."""

    def pods(url: str) -> dict[str, Any]:
        found = objects({"console": {"enabled": True}, "redis": {"url": url, **ELSEWHERE}})
        return {one["metadata"]["name"]: one["spec"]["template"] for one in found if one["kind"] in WORKLOADS}

    before, after = pods("redis://:secret@a"), pods("redis://:secret@b")
    assert 4 == len(before)
    assert before == pods("redis://:secret@a")
    assert all(before[name] != after[name] for name in before)
    assert "secret@" not in str(before)


@ALL
def test_what_selects_finds_the_pods_of_one_workload(values: dict[str, Any]) -> None:
    found = objects(values)
    pods = {one["metadata"]["name"]: one["spec"]["template"] for one in found if one["kind"] in WORKLOADS}

    def selected(labels: dict[str, str]) -> list[str]:
        return [name for name, pod in pods.items() if labels.items() <= pod["metadata"]["labels"].items()]

    for one in found:
        spec, name = one.get("spec", {}), one["metadata"]["name"]
        match one["kind"]:
            case "Service":
                (pod,) = selected(spec["selector"])
                assert name.removesuffix("-metrics") == pod
                ports = {port["name"] for port in pods[pod]["spec"]["containers"][0]["ports"]}
                assert {port["targetPort"] for port in spec["ports"]} <= ports
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
                assert [name] == selected(spec["selector"]["matchLabels"])
            case "NetworkPolicy":
                assert [name] == selected(spec["podSelector"]["matchLabels"])
            case "HorizontalPodAutoscaler" | "ScaledObject":
                assert spec["scaleTargetRef"]["name"] in pods
                target = next(x for x in found if x["kind"] in WORKLOADS and x["metadata"]["name"] == name)
                assert "replicas" not in target["spec"], "else each `helm upgrade` would take back what was scaled"
            case "ServiceMonitor":
                labels = spec["selector"]["matchLabels"].items()
                services = [x for x in found if x["kind"] == "Service" and labels <= x["metadata"]["labels"].items()]
                assert [name] == [x["metadata"]["name"] for x in services]
                (endpoint,) = spec["endpoints"]
                labelled = {each["targetLabel"]: each["replacement"] for each in endpoint["relabelings"]}
                assert {"job": SCRAPED["job_name"], "mesh": "mesh/seqmesh"} == labelled
                assert endpoint["honorLabels"], "else what the alerts know as `service` is called `exported_service`"
            case _:
                assert one["kind"] in {"PrometheusRule", "Secret", "ServiceAccount"}


def test_autoscalers_ask_for_metrics_that_exist_by_their_labels() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    known = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", page, re.MULTILINE)
    }
    keda, hpa = (objects(CASES[f"autoscaling by {kind}"]) for kind in ("KEDA", "HPA"))
    queries = [t["metadata"]["query"] for one in keda if one["kind"] == "ScaledObject" for t in one["spec"]["triggers"]]
    asked = [
        (name, labels)
        for query in queries
        for labels, name in re.findall(r"max by \(([\w, ]+)\) \((?:rate\()?(\w+)", query)
    ]
    external = [
        metric["external"]["metric"]["name"]
        for one in hpa
        if one["kind"] == "HorizontalPodAutoscaler"
        for metric in one["spec"]["metrics"]
    ]

    assert 4 == len(queries)
    assert 5 == len(asked)
    assert [known[name] for name, _ in asked] == [set(labels.split(", ")) for _, labels in asked]
    assert ["nv_inference_pending_request_count", "seqmesh_waiting_sequences"] == external
    assert set(external) <= set(known)
    assert all('{namespace="mesh",service="seqmesh-gateway-metrics"}' in query for query in queries)


def test_the_port_without_tls_is_of_no_service_that_may_be_reached_from_outside() -> None:
    case = CASES["TLS, restricted, settings of every kind"]
    found = [one["spec"] for one in objects(case) if one["kind"] == "Service" and "gateway" in one["metadata"]["name"]]

    assert {"LoadBalancer": {"http", "grpc"}, "ClusterIP": {"metrics"}} == {
        spec.get("type", "ClusterIP"): {port["name"] for port in spec["ports"]} for spec in found
    }


def test_network_policies_let_through_what_the_services_say_to_each_other_and_nothing_else() -> None:
    closed_mesh = objects(CASES["watched and closed"])
    found = {one["metadata"]["name"]: one["spec"] for one in closed_mesh if one["kind"] == "NetworkPolicy"}
    to_redis = [
        name
        for name, spec in found.items()
        if any(rule.get("ports") == [{"port": "redis"}] for rule in spec.get("egress", []))
    ]

    assert {"gateway", "scheduler", "executor", "console", "redis"} == {n.removeprefix("seqmesh-") for n in found}
    assert all(spec["policyTypes"] == ["Ingress", "Egress"] for spec in found.values())
    assert ["seqmesh-console", "seqmesh-executor", "seqmesh-gateway", "seqmesh-scheduler"] == sorted(to_redis)
    for silent in ("seqmesh-scheduler", "seqmesh-executor"):
        assert "ingress" not in found[silent]
    assert "egress" not in found["seqmesh-redis"]
    callers = found["seqmesh-gateway"]["ingress"][0]["from"]
    assert "executor" in [x["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component") for x in callers]


@pytest.mark.parametrize(("values", "words"), REFUSED)
def test_values_that_cannot_be_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedValuesError, match=re.escape(words)):
        rendered(values)


@pytest.mark.parametrize("name", ["a" * 53, "team.mesh", "a" * 37 + "-b", "seqmesh-" + "a" * 45, "2" * 53])
def test_a_release_of_any_name_has_objects_that_kubernetes_can_make(name: str) -> None:
    """Services: RFC 1035, 63 characters. A StatefulSet's name and a hash are a label of its pods."""
    made = [one for text in rendered({}, name=name).values() for one in yaml.safe_load_all(text) if one]

    for one in made:
        most = 52 if one["kind"] == "StatefulSet" else 63
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", one["metadata"]["name"]), one["metadata"]["name"]
        assert len(one["metadata"]["name"]) <= most
    assert len({(one["kind"], one["metadata"]["name"]) for one in made}) == len(made)


def test_the_values_of_the_documentation_are_taken() -> None:
    assert 3 <= len(DOCUMENTED)
    for values in DOCUMENTED:
        assert rendered(values) != rendered({})


def test_the_schema_and_the_defaults_name_the_same_values() -> None:
    defaults: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())

    def compared(said: dict[str, Any], known: dict[str, Any], path: str) -> None:
        assert not known["additionalProperties"], path
        assert set(said) == set(known["properties"]) - {"global"}, path
        for name, value in said.items():
            inner = known["properties"][name]
            if "properties" in inner:
                compared(value, inner, f"{path}.{name}")

    compared(defaults, yaml.safe_load(SCHEMA.read_text()), "values")


def test_the_schema_and_the_plain_manifests_are_as_they_are_made() -> None:
    assert schema() == SCHEMA.read_text(), "make reference"
    assert {path.name: path.read_text() for path in MANIFESTS.iterdir()} == manifests(), "make reference"
    assert settings_classes() == set(SETTINGS) - {"common"} | {"up"}


def test_the_chart_starts_this_release_of_the_images_that_are_built() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    built = {service["image"] for service in services.values() if "build" in service}

    assert chart["appVersion"] == chart["version"] == project["version"]
    made = containers(objects({"console": {"enabled": True}}))
    assert {f"{image}:{project['version']}" for image in built} == {
        made[name]["image"] for name in made if name != "redis"
    }
    guide = (ROOT / "docs/start/kubernetes.md").read_text()
    tags = re.findall(r"seqmesh-[$\w]+:([\w.]+)", guide.replace("@seqmesh-redis:6379", ""))
    assert [project["version"]] * 3 == tags, "those that the guide pushes, and names"
