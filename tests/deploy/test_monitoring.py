"""Dashboards and alert rules as files: sound by themselves, and about metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.reference.metrics import metrics
from tests.monitoring_files import (
    DASHBOARDS,
    PROMETHEUS,
    ROOT,
    SUFFIXES,
    expressions,
    metrics_of,
    panels,
    rules,
    with_values,
)

PROMTOOL = shutil.which("promtool")
OF_EACH_DASHBOARD = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
GUIDE = (ROOT / "docs" / "guides" / "monitoring.md").read_text()


def test_every_metric_of_an_expression_is_in_the_reference() -> None:
    page = metrics()
    known = set(re.findall(r"`((?:seqmesh|nv|process)_\w+)`", page))
    for where, expression in expressions():
        for name in metrics_of(expression):
            bare = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
            assert name in known or bare in known, f"{where}: {name}"


def test_the_guide_tells_of_every_alert_and_of_no_other() -> None:
    assert sorted(rule["alert"] for rule in rules()) == sorted(re.findall(r"^### (Seqmesh\w+)$", GUIDE, re.MULTILINE))


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_it_means_and_what_to_do(rule: dict[str, Any]) -> None:
    assert {"summary", "runbook"} == set(rule["annotations"])
    assert rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_tells_the_meshes_of_one_prometheus_apart(rule: dict[str, Any]) -> None:
    aggregated = re.findall(r"\b(?:sum|min|max|count)\b *(.*?)\(", rule["expr"], re.DOTALL)
    by = re.findall(r"\b(?:sum|min|max|count) by \(([\w, ]+)\)", rule["expr"])

    assert len(aggregated) == len(by), "over all meshes"
    assert all(labels.split(", ")[0] == "mesh" for labels in by)


@OF_EACH_DASHBOARD
def test_a_dashboard_asks_for_the_meshes_that_are_chosen_and_leads_to_the_others_with_them(dashboard: Path) -> None:
    document = json.loads(dashboard.read_text())
    mesh, *others = document["templating"]["list"]
    (link,) = document["links"]

    assert ("mesh", True, True) == (mesh["name"], mesh["multi"], mesh["includeAll"])
    assert ".*" == mesh["allValue"], "else a mesh without the label is of no choice"
    assert {"text": ["All"], "value": ["$__all"]} == mesh["current"]
    assert 'label_values(up{job="seqmesh"}, mesh)' == mesh["query"]["query"] == mesh["definition"]
    for variable in others:
        assert not unselected(variable["query"]["query"])
        assert variable["query"]["query"] == variable["definition"]
    assert ("dashboards", True) == (link["type"], link["includeVars"])
    assert set(link["tags"]) <= set(document["tags"])


def test_every_expression_of_a_dashboard_is_of_the_meshes_that_are_chosen() -> None:
    for where, expression in expressions():
        if where.startswith("seqmesh-"):
            assert metrics_of(expression) or "ALERTS" in expression, where
            assert not unselected(expression), where


def unselected(expression: str) -> list[str]:
    """Names of what it reads whatever mesh is chosen."""
    read = re.findall(r"\b((?:seqmesh|nv|process)_[a-z0-9_]+|ALERTS)\b({[^}]*})?", expression)
    return [name for name, selector in read if 'mesh=~"$mesh"' not in selector]


@OF_EACH_DASHBOARD
def test_a_chart_shows_each_mesh_by_itself_and_a_single_figure_is_of_the_chosen_ones_together(dashboard: Path) -> None:
    """The greatest of several meshes hides the others, also in a single figure."""
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            expression, legend = target["expr"], target["legendFormat"]
            by = re.findall(r"\b(?:sum|min|max|count) by \(([\w, ]+)\)", expression)
            over_all = re.findall(r"\b(sum|min|max|count)\(", expression)

            assert "max" not in over_all, panel["title"]
            if panel["type"] == "heatmap":
                assert ([], ["le"]) == (over_all, by), panel["title"]
            else:
                assert all(labels.split(", ")[0] == "mesh" for labels in by), panel["title"]
                assert panel["type"] == "stat" or not over_all, panel["title"]
                assert panel["type"] == "stat" or legend.endswith("{{mesh}}"), panel["title"]


@OF_EACH_DASHBOARD
def test_the_panels_of_a_dashboard_have_places_and_a_source(dashboard: Path) -> None:
    found = panels(dashboard)
    provisioned = yaml.safe_load((dashboard.parents[1] / "provisioning/datasources/prometheus.yaml").read_text())
    source = {"type": "prometheus", "uid": provisioned["datasources"][0]["uid"]}

    assert len(found) == len({panel["id"] for panel in found})
    for panel in found:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert source == panel["datasource"]
            assert {str(source)} == {str(target["datasource"]) for target in panel["targets"]}
    for one, other in combinations((panel["gridPos"] for panel in found), 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_exemplars_lead_to_a_source_of_traces_which_is_the_viewer() -> None:
    text = (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text()
    sources: dict[str, Any] = {one["uid"]: one for one in yaml.safe_load(text)["datasources"]}
    (link,) = sources["seqmesh"]["jsonData"]["exemplarTraceIdDestinations"]
    services = yaml.safe_load((ROOT / "deploy/compose.traces.yaml").read_text())["services"]

    traces = sources[link["datasourceUid"]]
    assert ("trace_id", "jaeger") == (link["name"], traces["type"])
    service, _, port = traces["url"].removeprefix("http://").partition(":")
    assert services[service]["ports"][0].endswith(f":{port}")
    assert "front" in services[service]["networks"], "the network of Grafana"


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
@pytest.mark.parametrize(
    "check",
    [("check", "config", "prometheus.yaml"), ("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")],
)
def test_prometheus_own_tool_finds_no_fault(check: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    ran = subprocess.run([PROMTOOL, *check], cwd=PROMETHEUS, capture_output=True, text=True, check=False, timeout=60)
    assert 0 == ran.returncode, ran.stdout + ran.stderr


def test_every_alert_is_made_to_fire_by_a_test_of_the_rules() -> None:
    text = (PROMETHEUS / "alerts_test.yaml").read_text()
    assert [] == [rule["alert"] for rule in rules() if f'"{rule["alert"]}"' not in text]


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
def test_prometheus_own_tool_reads_every_expression_of_a_dashboard(tmp_path: Path) -> None:
    """Of all meshes, and of two as Grafana writes them."""
    asked = [
        {"record": f"asked_{number}", "expr": with_values(expression, "m", mesh), "labels": {"where": where}}
        for number, (where, expression) in enumerate(expressions())
        for mesh in (".*", "(blue|prod/seqmesh)")
    ]
    rule_file = tmp_path / "asked.yaml"
    rule_file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": asked}]}))
    ran = subprocess.run([str(PROMTOOL), "check", "rules", rule_file], capture_output=True, text=True, check=False)
    assert 0 == ran.returncode, ran.stdout + ran.stderr


def shown(where: str, series: dict[str, str], expected: dict[str, float], directory: Path, *, mesh: str = ".*") -> None:
    """Asserts what the last expression of a panel makes of series with a sample every 15 s, in the sixth minute."""
    expression = with_values(dict(expressions())[where], "m", mesh)
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    test = {
        "interval": "15s",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": "5m", "exp_samples": samples}],
    }
    asked = directory / "test.yaml"
    asked.write_text(yaml.safe_dump({"tests": [test]}))
    ran = subprocess.run([str(PROMTOOL), "test", "rules", asked], capture_output=True, text=True, check=False)
    assert 0 == ran.returncode, ran.stdout + ran.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
@pytest.mark.parametrize("label", ["instance", "pod"])
def test_two_gateways_that_count_the_same_are_shown_once(label: str, tmp_path: Path) -> None:
    """In Kubernetes a gateway has the label `pod`, too."""
    series = {f'nv_inference_request_success{{model="m",{label}="{gateway}"}}': "0+15x40" for gateway in "ab"}
    shown("seqmesh-overview: Requests a second", series, {'{model="m"}': 1}, tmp_path)


def test_every_figure_of_the_mesh_is_shown_once_however_many_gateways_show_it() -> None:
    for where, expression in expressions():
        assert "without (instance)" not in expression, where


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
def test_batches_of_one_row_are_shown_as_that(tmp_path: Path) -> None:
    """Within its lowest bucket a quantile is taken as a part of it."""
    series = {f'seqmesh_batch_size_bucket{{model="m",le="{bound}"}}': "0+15x40" for bound in ("1.0", "2.0", "+Inf")}
    shown("seqmesh-model: Rows of a batch", series, {'{model="m"}': 1}, tmp_path)


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
def test_alerts_of_others_are_not_shown(tmp_path: Path) -> None:
    series = {f'ALERTS{{alertstate="firing",alertname="{name}"}}': "1x40" for name in ("SeqmeshNoLeader", "DiskFull")}
    shown("seqmesh-overview: Firing alerts", series, {"{}": 1}, tmp_path)


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
@pytest.mark.parametrize("mesh", ["blue", "(blue|green)", ".*"])
def test_the_figures_of_two_meshes_are_shown_apart(mesh: str, tmp_path: Path) -> None:
    labels = '{model="m",instance="%s",mesh="%s"}'
    steps = {"nv_inference_request_success" + labels % pair: "0+15x40" for pair in (("a", "blue"), ("b", "green"))}
    executors = {f'seqmesh_executors{{state="serving",mesh="{one}"}}': "2x40" for one in ("blue", "green")}
    chosen = ["blue", "green"] if mesh != "blue" else ["blue"]

    expected = {f'{{mesh="{one}",model="m"}}': 1.0 for one in chosen}
    shown("seqmesh-overview: Requests a second", steps, expected, tmp_path, mesh=mesh)
    shown("seqmesh-overview: Executors serving", executors, {"{}": 2.0 * len(chosen)}, tmp_path, mesh=mesh)
