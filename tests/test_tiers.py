"""The tiers of tests: what puts a test into one, and what `make test` runs in any case."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from tests.tiers import EVERYDAY_FILES, PROGRAMS, SERVICES, Tier, tier_of

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("tier", "path", "fixtures"),
    [
        ("unit", "scheduler/core/test_backlog.py", ["tmp_path"]),
        ("everyday", "scheduler/test_scheduling.py", ["redis", "redis_server"]),
        ("everyday", "deploy/test_cli.py", []),
        ("everyday", "mesh/test_sequences.py", ["mesh", "shared_mesh"]),
        ("everyday", "conformance/test_grpc.py", ["target", "shared_target"]),
        ("everyday", "mesh/test_killed_processes.py", ["victim", "shared_victim"]),
        ("long", "mesh/test_client.py", ["victim", "shared_victim"]),
        ("long", "mesh/test_operations.py", ["explicit_mesh"]),
        ("long", "conformance/test_calls.py", ["make_target"]),
        ("long", "simulation/test_simulation.py", []),
        ("long", "deploy/test_demo.py", ["tmp_path"]),
    ],
)
def test_what_a_test_uses_puts_it_into_its_tier(tier: Tier, path: str, fixtures: Collection[str]) -> None:
    assert tier == tier_of(path, fixtures, starts_processes=False)


def test_a_test_that_is_marked_as_starting_processes_is_long() -> None:
    assert "long" == tier_of("executor/engine/test_calls.py", [], starts_processes=True)


@pytest.mark.parametrize("path", sorted(EVERYDAY_FILES | PROGRAMS | SERVICES))
def test_what_is_named_exists(path: str) -> None:
    assert (TESTS / path).exists()
