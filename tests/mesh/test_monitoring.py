"""Dashboards and alert rules on a running mesh: after some traffic and a takeover every metric that they name is there.

Where there is a Prometheus on this machine, it scrapes the mesh and answers every expression.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import urllib.parse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.openmetrics import parser

from deploy.local.embedded import free_port
from shared.statistics.meter import Phase
from shared.store.metering import METERING_INTERVAL_S
from tests.mesh.raw_http import get, send
from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.traffic import Callers, Traffic, make_plans
from tests.monitoring_files import PROMETHEUS, SELDOM, expressions, metrics_of, with_values

MODEL = "slow_sum"
untyped: Any = parser
SERVER = shutil.which("prometheus")
MEASURED = "seqmesh_steps_total", "seqmesh_request_duration_seconds_count"
"""What executors and gateways hand on about once a second."""
MAY_BE_EMPTY = (">", "<", " == ", "absent(")
"""Expressions with a comparison, or that ask what is missing, show nothing while all is well."""


def families(mesh: RunningMesh, gateway: int = 0) -> dict[str, Metric]:
    """The page in OpenMetrics, read strictly."""
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    reply = send(mesh.http(gateway), "GET", "/metrics", headers=accept)
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    return {family.name: family for family in untyped.text_string_to_metric_families(reply.body.decode())}


def value(found: dict[str, Metric], sample: str, **labels: str) -> float:
    """Sum of a model's samples of this name with these labels."""
    labels = {"model": MODEL, **labels}
    return sum(
        one.value
        for family in found.values()
        for one in family.samples
        if one.name == sample and labels.items() <= one.labels.items()
    )


async def settled(mesh: RunningMesh) -> dict[str, Metric]:
    """The page once no process still has to hand on what it measured of the traffic of an earlier test."""
    found = families(mesh)
    while True:
        await asyncio.sleep(2 * METERING_INTERVAL_S)
        earlier, found = found, families(mesh)
        if all(value(earlier, sample) == value(found, sample) for sample in MEASURED):
            return found


async def traffic_with_a_takeover(mesh: RunningMesh, chance: random.Random) -> int:
    """Returns how many steps were answered."""
    plans = make_plans(chance, 12, shortest=8, longest=12)
    async with Callers(mesh) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic(MODEL, callers, plans, chance)
        group.create_task(traffic.run())
        await traffic.progress(0.3)
        mesh.kill("executor-1")
    return sum(len(plan.values) for plan in plans)


@pytest.mark.timeout(400)
async def test_every_metric_of_dashboards_and_rules_is_there_after_a_takeover(
    victim: RunningMesh, chance: random.Random, tmp_path: Path
) -> None:
    before = await settled(victim)
    steps = await traffic_with_a_takeover(victim, chance)

    def grown(sample: str, **labels: str) -> float:
        return value(families(victim), sample, **labels) - value(before, sample, **labels)

    # Exact: counted by the scripts.
    assert 12 == grown("seqmesh_sequences_started_total")
    assert 12 == grown("seqmesh_sequences_ended_total", reason="end")
    assert 0 < grown("seqmesh_takeovers_total", cause="lost")
    assert 0 < grown("seqmesh_slot_wait_duration_seconds_count", cause="takeover")
    # The executor that was killed took what it had measured in its last second along.
    await eventually(lambda: steps / 2 < grown("seqmesh_steps_total", outcome="done"), "steps are measured")
    assert grown("seqmesh_steps_total", outcome="done") <= steps
    assert grown("seqmesh_checkpoint_bytes_total") >= 8 * grown("seqmesh_checkpoints_total") > 0
    # The gateways live. The other one hands on every second, twice if it cannot know whether Redis has taken it.
    await eventually(lambda: grown("seqmesh_request_duration_seconds_count") >= steps, "every answer is measured")
    assert grown("seqmesh_request_duration_seconds_count") <= 2 * steps
    for phase in Phase:
        assert 0 < grown("seqmesh_request_phase_duration_seconds_count", phase=phase)

    shown = {sample.name for family in families(victim).values() for sample in family.samples}
    for where, expression in expressions():
        assert metrics_of(expression) <= {*shown, *SELDOM}, where
    if SERVER is not None:
        await every_expression_is_answered(victim, chance, SERVER, tmp_path)


async def every_expression_is_answered(mesh: RunningMesh, chance: random.Random, server: str, directory: Path) -> None:
    """A real Prometheus scrapes both gateways."""
    with scraping(server, mesh, directory) as url:
        await eventually(lambda: ask(url, "count(up == 1)") == ["2"], "both gateways are scraped")
        await traffic_with_a_takeover(mesh, chance)
        name = f'seqmesh_request_duration_seconds_count{{model="{MODEL}"}}'
        await eventually(lambda: ask(url, f"max(rate({name}[1m])) > 0"), "the traffic is seen")

        for where, expression in expressions():
            asked = with_values(expression, MODEL)
            answer = ask(url, asked)
            is_seldom = any(metric in expression for metric in SELDOM)
            assert answer or is_seldom or any(word in expression for word in MAY_BE_EMPTY), f"{where}: {asked}"
        # Twice the rate, if the gateways' equal figures were added instead of compared.
        one, both = (
            float(ask(url, f"{of} (increase({name}[5m]))")[0])
            for of in ("max without (instance)", "sum without (instance)")
        )
        assert pytest.approx(2 * one, rel=0.2) == both


@contextmanager
def scraping(server: str, mesh: RunningMesh, directory: Path) -> Generator[str]:
    """A Prometheus with the rules of the mesh, and its address."""
    own = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    own["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    own["rule_files"] = [str(PROMETHEUS / "alerts.yaml")]
    (job,) = own["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [mesh.http(gateway) for gateway in range(2)]}]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(own))
    port = free_port()
    command = [
        server,
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with (directory / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def ask(url: str, expression: str) -> list[str]:
    """Values of an instant query; [] also while the server starts."""
    try:
        reply = get(url, f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    except OSError:
        return []
    if reply.status == 503:
        return []
    document: dict[str, Any] = json.loads(reply.body)
    assert "success" == document["status"], (expression, document)
    return [one["value"][1] for one in document["data"]["result"]]
