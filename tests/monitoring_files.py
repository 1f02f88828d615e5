"""The dashboards, rules and settings of `deploy/grafana` and `deploy/prometheus`, and the metrics that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
METRIC = re.compile(r"\b(?:seqmesh|nv|process)_[a-z0-9_]+")
SUFFIXES = ("_bucket", "_sum", "_count")
SELDOM = {
    "nv_gpu_utilization": "executors with GPUs",
    "nv_gpu_memory_used_bytes": "executors with GPUs",
    "seqmesh_model_unserved": "a model has lost its last executor",
    "seqmesh_unreadable_values_total": "a value could not be read",
}
"""Metrics that a healthy mesh on a machine without GPUs does not show."""


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels(dashboard: Path) -> list[dict[str, Any]]:
    return json.loads(dashboard.read_text())["panels"]


def expressions() -> Iterable[tuple[str, str]]:
    """Where it stands, and the expression, with the variables of dashboards as they are written."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for dashboard in DASHBOARDS:
        document = json.loads(dashboard.read_text())
        for annotation in document["annotations"]["list"]:
            yield f"{dashboard.stem}: {annotation['name']}", annotation["expr"]
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                yield f"{dashboard.stem}: {panel['title']}", target["expr"]


def with_values(expression: str, model: str, mesh: str = ".*") -> str:
    """The expression as Grafana asks it; of all meshes by default, also of one whose gateways have no label."""
    values = {"$__rate_interval": "1m", "$model": model, "$mesh": mesh}
    return re.sub(r"\$\w+", lambda variable: values[variable[0]], expression)


def metrics_of(expression: str) -> set[str]:
    """Names of the samples that an expression reads."""
    return set(METRIC.findall(expression))
