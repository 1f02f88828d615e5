"""Conformance: what a user of Triton sees, over the network, on a mesh or on a real Triton.

How to write a test here
------------------------
One file per area, `test_<area>.py`, of async tests. The same test runs against a mesh (`make test`) and, by
`make conformance TRITON_PYTHON=/path/to/venv/bin/python` (a virtual environment with nvidia-pytriton 0.7.0), against a
real Triton 2.51. Where they differ, the test says so and why:

    @pytest.mark.mesh_only("state of the python backend: Triton has none")     is skipped on Triton
    @pytest.mark.differs("strings for an integer CORRID are refused")          runs on both; ask `target.is_mesh`

Fixtures:

    target        a running server with every model of `models` (a mesh: of `mesh_models` too), one executor. Shared by
                  the whole run; a test must not have killed any of its processes
    wide_target   the same with two executors; on Triton: twice the instances
    make_target   make_target(models, env={...}, options={"model-control-mode": "explicit"}, executors=2): a server of
                  the test's own, for special settings. Costs seconds: prefer a model of the shared target
    caller        `calls.Caller`, parametrised over HTTP and gRPC; `caller.of(model)`, `await caller.infer(Step(...))`
    lone_caller   the same over gRPC alone, where the protocol makes no difference
    gate          `calls.Gate`: holds a call of `execute`, so that what comes meanwhile shares the next batch

Models: a directory with a config.pbtxt under `models` (works on both) or `mesh_models`; without a version directory it
is served by `recorder.py`, which answers with all that `execute` saw (`answer.seen.rows`, `.row`, `.call`, `.instance`)
and obeys the parameters `hold`, `fail` and `raise`. Write `instance_group [ { kind: KIND_CPU count: 1 } ]` down. Tests
may share a model if none leaves a sequence open; one that looks at slots, rows or counts has a model of its own.

Order: only requests of one `calls.Stream` are accepted in the order sent, and between different sequences only if these
are `calls.neighbours` (one shard of a mesh). Ids come from `fresh_id`, `fresh_text`, `neighbours`.
Never assert absolute times; wait by `tests.mesh.running_mesh.eventually`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.calls import Caller, Gate
from tests.conformance.repository import standard_models
from tests.conformance.targets import TRITON_PYTHON, TRITON_START_S, Target, running_target
from tests.groups import Shared

TARGETS = pytest.StashKey[list[Target]]()


def pytest_configure(config: pytest.Config) -> None:
    """The markers of this suite."""
    config.addinivalue_line("markers", "mesh_only(reason): a real Triton cannot pass this")
    config.addinivalue_line("markers", "differs(reason): expects something else of a real Triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what only a mesh can pass; a marker without a reason is a mistake."""
    for item in items:
        for marker in (*item.iter_markers("mesh_only"), *item.iter_markers("differs")):
            assert marker.args and isinstance(marker.args[0], str), f"{item.nodeid}: a marker needs its reason"
        only = item.get_closest_marker("mesh_only")
        if TRITON_PYTHON and only is not None:
            item.add_marker(pytest.mark.skip(reason=only.args[0]))
        if TRITON_PYTHON and Path(__file__).parent in item.path.parents:
            # The first test pays for the server's start, where every instance is a process.
            item.add_marker(pytest.mark.timeout(TRITON_START_S + 60))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test's report ends with what its servers logged."""
    report = yield
    if report.failed:
        for target in targets_of(item):
            report.sections += target.log_sections()
    return report


def targets_of(item: Any) -> list[Target]:
    """The servers that a test has used so far. item: typed loosely, as `request.node` is."""
    return item.stash.setdefault(TARGETS, [])


def watched(request: pytest.FixtureRequest, target: Target) -> Iterator[Target]:
    """The server for one test: its logs go into the report, and the test must not have killed a process."""
    targets_of(request.node).append(target)
    deaths = target.deaths()
    yield target
    assert deaths == target.deaths()


def target_for_many(tmp_path_factory: pytest.TempPathFactory, executors: int) -> Shared[Target]:
    """A server for many tests. executors: of a mesh; Triton has so many times the instances"""
    models = standard_models(mesh=not TRITON_PYTHON)
    return Shared(lambda: running_target(tmp_path_factory.mktemp("conformance"), models, executors=executors))


@pytest.fixture(scope="session")
def shared_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Target]]:
    """The server behind `target`."""
    with target_for_many(tmp_path_factory, 1) as shared:
        yield shared


@pytest.fixture
def target(request: pytest.FixtureRequest, shared_target: Shared[Target]) -> Iterator[Target]:
    """One executor, or a Triton, with every model."""
    yield from watched(request, shared_target.get())


@pytest.fixture(scope="session")
def shared_wide_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Target]]:
    """The server behind `wide_target`."""
    with target_for_many(tmp_path_factory, 2) as shared:
        yield shared


@pytest.fixture
def wide_target(request: pytest.FixtureRequest, shared_wide_target: Shared[Target]) -> Iterator[Target]:
    """Two executors, or a Triton with twice the instances, with every model."""
    yield from watched(request, shared_wide_target.get())


MakeTarget = Callable[..., Target]


@pytest.fixture
def make_target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTarget]:
    """Starts servers of the test's own: `make_target(models, env=..., options=..., executors=...)`."""
    with ExitStack() as stack:

        def make(models: Any, **arguments: Any) -> Target:
            directory = tmp_path / f"target{len(targets_of(request.node))}"
            directory.mkdir()
            target = stack.enter_context(running_target(directory, models, **arguments))
            targets_of(request.node).append(target)
            return target

        yield make


@pytest.fixture(params=["http", "grpc"])
async def caller(request: pytest.FixtureRequest, target: Target) -> AsyncIterator[Caller]:
    """Unary calls of `target`, over each protocol."""
    async with Caller(request.param, target) as made:
        yield made


@pytest.fixture
async def lone_caller(target: Target) -> AsyncIterator[Caller]:
    """Unary calls of `target` over gRPC."""
    async with Caller("grpc", target) as made:
        yield made


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate that is open at the latest when the test is over."""
    made = Gate(tmp_path)
    yield made
    made.open()
