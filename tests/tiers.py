"""The three tiers of tests. What a test uses puts it into one: its folder, its file, its fixtures.

| tier | what its tests use | who runs them |
| --- | --- | --- |
| `unit` | neither a server nor a process | `make unit`, `make test`, `make test-all` |
| (no mark) | a server, a mesh that many files share, a small program | `make test`, `make test-all` |
| `long` | meshes, services or models' processes of their own, many kills, trials by chance | `make test-all` |
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Tier = Literal["unit", "everyday", "long"]

TRIALS = ("chaos", "e2e", "fuzz", "incidents", "simulation")
"""Folders of tests that try whole services, often by chance and for long."""
OF_MESHES = ("conformance", "mesh")
"""Folders of tests that use meshes. Those that use none of `EVERYDAY_MESHES` start their own."""
EVERYDAY_MESHES = frozenset({"shared_mesh", "shared_target"})
"""Fixtures of meshes that many files share, and whose processes live."""
EVERYDAY_FILES = frozenset(
    {
        # They read the code alone.
        "conformance/test_table.py",
        "simulation/test_mutants.py",
        # Of those that kill the processes of `shared_victim`: every service is killed in it.
        "mesh/test_killed_processes.py",
    }
)
"""Files of all these folders that are not long, either."""
SERVERS = frozenset({"redis_server", "redis_cluster", "private_server", "private_cluster", "otlp_receiver"})
"""Fixtures that start a server."""
SERVICES = frozenset(
    {
        "benchmarks/test_bench.py",
        "benchmarks/test_soak.py",
        "client/test_wheel.py",
        "deploy/analyze/test_analyze.py",
        "deploy/test_demo.py",
        "deploy/test_demo_vad.py",
        "deploy/test_launcher.py",
        "deploy/test_reshard.py",
        "executor/engine/test_process_engine.py",
        "gateway/bounds/test_hostile_memory.py",
        "gateway/http/test_hostile_clients.py",
        "shared/store/connections/test_moved_slots.py",
        "shared/store/connections/test_sentinels.py",
    }
)
"""Files of other folders that start meshes, services, or programs that take long."""
PROGRAMS = frozenset(
    {
        "benchmarks/test_bench_memory.py",
        "client/test_forks.py",
        "deploy/kubernetes/test_chart.py",
        "deploy/test_cli.py",
        "deploy/test_compose_checks.py",
        "deploy/test_embedded.py",
        "deploy/test_locks.py",
        "deploy/test_monitoring.py",
        "deploy/test_systemd.py",
        "docs/test_blocks.py",
        "docs/test_links.py",
        "executor/configuration/test_config_json.py",
        "executor/engine/test_backends.py",
        "executor/engine/test_mkl.py",
        "executor/engine/test_model_completion.py",
        "executor/engine/test_tensorflow_engine.py",
        "executor/models/test_configuration_choice.py",
        "executor/remote/test_repository.py",
        "shared/process/test_collector.py",
        "shared/process/test_forked_logs.py",
        "shared/process/test_lifecycle.py",
        "shared/store/test_health.py",
        "shared/traces/test_tracing.py",
        "test_failures.py",
        "test_hold_ups.py",
    }
)
"""Files of other folders that start processes, which are soon over."""


def tier_of(path: str, fixtures: Collection[str], *, starts_processes: bool) -> Tier:
    """The tier of a test.

    path              its file, below `tests`
    fixtures          what it uses, and what these use
    starts_processes  whether it, or this value of its parameters, is marked so: a process more for each such test
    """
    folder = path.split("/", maxsplit=1)[0]
    if path in EVERYDAY_FILES:
        return "everyday"
    if folder in TRIALS or path in SERVICES or starts_processes:
        return "long"
    if folder in OF_MESHES:
        return "long" if EVERYDAY_MESHES.isdisjoint(fixtures) else "everyday"
    if path in PROGRAMS or not SERVERS.isdisjoint(fixtures):
        return "everyday"
    return "unit"
