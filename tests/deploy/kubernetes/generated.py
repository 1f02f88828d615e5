"""What of the chart is made: the settings in its schema, from the code; its alerts, and their names in the schema,
from those of `deploy/prometheus`, because a chart reads no file outside itself; and the plain manifests, made from the
chart.

Helm refuses a setting that does not exist, or whose value cannot be, before anything is started.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, cast

from deploy.console.settings import ConsoleSettings
from executor.settings import ExecutorSettings
from gateway.settings import GatewaySettings
from scheduler.settings import SchedulerSettings
from shared.settings import ENTRY_POINTS, Meaning, MeshSettings, SettingsClass
from tests.deploy.kubernetes.chart import CHART, rendered
from tests.markdown_pages import ROOT
from tests.monitoring_files import PROMETHEUS, rules

SCHEMA = CHART / "values.schema.json"
ALERTS = CHART / "alerts.yaml"
MANIFESTS = ROOT / "deploy" / "kubernetes"
SETTINGS: dict[str, type[SettingsClass]] = {
    "common": MeshSettings,
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "executor": ExecutorSettings,
    "console": ConsoleSettings,
}
OF_THE_CHART = {
    # What the chart says itself, so that its ports, volumes and probes fit.
    *("http_port", "grpc_port", "metrics_port", "console_port", "models", "model_cache_dir", "data_dir"),
    *("http_server_cert", "http_server_key", "grpc_use_ssl", "grpc_server_cert", "grpc_server_key"),
    # Of one process: pods of a Deployment are called after themselves. The launcher's socket is not in a pod, and a
    # gateway has its pod's ports for itself.
    *("name", "console_control", "reuse_port"),
}
ALERTS_HEAD = "# Written by `make reference` from deploy/prometheus/alerts.yaml. Change that one.\n"
HEAD = "# Written by `make reference` from deploy/helm/seqmesh with its defaults. Change the chart, not this file.\n"
WIDTH = 120
NUMBERS = {int: "integer", float: "number", bool: "boolean"}


def schema() -> str:
    """values.schema.json: what is written there by hand, and the settings of each service."""
    written = json.loads(SCHEMA.read_text())
    for name, kind in SETTINGS.items():
        written["definitions"][f"{name}_settings"] = schema_of(kind)
    written["definitions"] |= schemas_of_alerts()
    return json_text(written) + "\n"


def json_text(value: Any, indent: str = "", before: int = 0) -> str:
    """JSON in which each value that fits into a line has one. before: characters in front of it in its line"""
    line = json.dumps(value)
    if len(indent) + before + len(line) < WIDTH or not isinstance(value, (dict, list)):
        return line
    inner = f"{indent}  "
    if isinstance(value, list):
        begin, parts, end = "[", [json_text(one, inner) for one in cast("list[Any]", value)], "]"
    else:
        names = {json.dumps(name) + ": ": one for name, one in cast("dict[str, Any]", value).items()}
        begin, parts, end = "{", [name + json_text(one, inner, len(name)) for name, one in names.items()], "}"
    return begin + ",".join(f"\n{inner}{part}" for part in parts) + f"\n{indent}{end}"


def schema_of(settings_type: type[SettingsClass]) -> dict[str, Any]:
    """The settings of a service that values may name."""
    kinds = typing.get_type_hints(settings_type)
    found = {
        field.name: schema_of_setting(kinds[field.name], field.metadata["meaning"])
        for field in dataclasses.fields(settings_type)
        if field.name not in OF_THE_CHART and not field.metadata["meaning"].secret
    }
    return closed(found)


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has no other names."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def schema_of_setting(kind: Any, meaning: Meaning) -> dict[str, Any]:
    """One setting. A list of texts is an array, without the comma that separates them in the environment."""
    if typing.get_origin(kind) is Literal:
        return {"enum": list(typing.get_args(kind))}
    if typing.get_origin(kind) is tuple and typing.get_args(kind)[0] is str:
        return {"type": "array", "items": {"type": "string", "pattern": "^[^,]*$"}}
    if kind not in NUMBERS:
        return {"type": "string"}
    bounds = {"minimum": meaning.minimum, "maximum": meaning.maximum}
    number = {"type": NUMBERS[kind]} | {name: bound for name, bound in bounds.items() if bound is not None}
    # A size may have a unit: 64MiB.
    return (
        {"anyOf": [number, {"type": "string", "pattern": "^[0-9]+ *[kKMG]i?B$"}]} if meaning.unit == "bytes" else number
    )


def schemas_of_alerts() -> dict[str, Any]:
    """What of each alert values may change. Its bound is the number at the end of the one comparison that decides."""
    changes = {
        "enabled": {"type": "boolean"},
        "for": {"type": "string", "pattern": "^[0-9]+[smhd]$"},
        "severity": {"type": "string", "minLength": 1},
    }
    kinds = {rule["alert"]: "alert_with_bound" if has_bound(rule["expr"]) else "alert" for rule in rules()}
    return {
        "alert": closed(changes),
        "alert_with_bound": closed({"bound": {"type": "number", "minimum": 0}, **changes}),
        "alerts": closed({alert: {"$ref": f"#/definitions/{kind}"} for alert, kind in kinds.items()}),
    }


def has_bound(expression: str) -> bool:
    """Whether an alert compares with a number that an operator may choose."""
    return " or " not in expression and re.search(r"[<>] [0-9.]+$", expression) is not None


def alerts() -> str:
    """The chart's alerts.yaml."""
    return ALERTS_HEAD + (PROMETHEUS / "alerts.yaml").read_text()


def manifests() -> dict[str, str]:
    """The files of deploy/kubernetes: the chart with its defaults, in whatever namespace they are applied."""
    made = rendered({}, namespace="NAMESPACE")
    return {name: HEAD + text.replace("  namespace: NAMESPACE\n", "") for name, text in made.items()}


def settings_classes() -> Iterable[str]:
    """The programs that have settings."""
    return {one.name for one in entry_points(group=ENTRY_POINTS)}


def write(folder: Path = MANIFESTS) -> None:
    """Writes all of it."""
    SCHEMA.write_text(schema())
    ALERTS.write_text(alerts())
    folder.mkdir(exist_ok=True)
    for name, text in manifests().items():
        (folder / name).write_text(text)
