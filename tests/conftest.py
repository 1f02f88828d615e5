"""Fixtures that every test may use: a real embedded server, a key prefix per test, and the check for leaked keys.

One server serves the whole run. Tests stay apart by key prefix, never by emptying the server. A test that must kill or
restart a server asks for `private_server` instead, which is its own.

The tests in `STORE_CONTRACT` run twice: on the server, and on the in-memory twin that the simulation runs on.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from redis import Redis

from executor.engine.mkl import ask_for_fixed_products
from shared.store.commands import Redis as AsyncRedis
from shared.store.connections.redis_client import connect
from tests.embedded_cluster import EmbeddedCluster
from tests.embedded_redis import EmbeddedRedis
from tests.failures import HAS_FAILED, leave_nothing
from tests.groups import GroupScheduling, Shared, group_of, in_groups
from tests.hold_ups import hold_up_processes
from tests.key_leaks import leaked_keys, remove_keys, remove_libraries
from tests.mesh import running_mesh
from tests.other_server import use_server
from tests.otlp_receiver import OtlpReceiver
from tests.simulation.connections import Server, direct_client, loop_timer
from tests.simulation.lua_scripts import run_script
from tests.simulation.store import Store, StoreKeys
from tests.tiers import tier_of

# A loaded machine is slow, which is no fault of what a property test looks at.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# In CI the same examples each time: what chance finds is for those who look for it, not for an unrelated change.
settings.register_profile("ci", settings.get_profile("patient"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "patient")

# The developer's own mesh must not leak into the tests' settings (it would also be refused where it is unknown).
for variable in [name for name in os.environ if name.startswith("SEQMESH_")]:
    del os.environ[variable]

# Engines run in this process, too: as in an executor, this comes before anything is computed.
ask_for_fixed_products()

# Tests start hundreds of processes: where bytecode is not kept, each of them compiles every module anew. pytest keeps
# rewritten assertions as bytecode, too: to rewrite them is half of what a worker's collection costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

SERVER, TWIN = "server", "twin"


STORE_CONTRACT = frozenset(
    {
        "scheduler/test_cancellations.py",
        "scheduler/test_model_changes.py",
        "scheduler/test_scheduling.py",
        "shared/store/test_counting.py",
        "shared/store/test_libraries.py",
        "shared/contract/test_response_cache.py",
        "shared/store/test_scripts.py",
        "shared/store/test_vital.py",
        "shared/store/test_work_scripts.py",
    }
)
"""Files whose tests say what a store of the mesh must do."""


STARTS = "starts_processes"
"""Mark of single tests, or values of their parameters, that are long."""


def tier_mark(item: pytest.Item) -> str:
    """The mark of a test's tier (tests/tiers.py), or "" for one that `make test` runs beside the unit tests."""
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    fixtures: Sequence[str] = getattr(item, "fixturenames", ())
    tier = tier_of(path, fixtures, starts_processes=item.get_closest_marker(STARTS) is not None)
    return "" if tier == "everyday" else tier


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without the garbage collector, which would look again and again at tests and modules that stay to the
    end: a third of a worker's collection. Nor does it look at them while the tests run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Marks the tiers, before `-m` selects one. Then keeps together what shares a mesh, after the order of files and
    tests was drawn (pytest-randomly).
    """
    for item in items:
        if mark := tier_mark(item):
            item.add_marker(mark)
    yield
    items[:] = in_groups(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers that a test has failed. Its report ends with what the processes of its meshes logged."""
    report = yield
    if report.failed:
        item.stash[HAS_FAILED] = True
        for mesh in running_mesh.seen:
            report.sections += mesh.log_sections()
    if report.when == "teardown":
        running_mesh.seen[:] = [mesh for mesh in running_mesh.seen if not mesh.is_closed]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Closes what a group has shared, after its last test; everything, after a test that has failed by its end."""
    has_failed = True
    try:
        yield
        has_failed = item.stash.get(HAS_FAILED, False)
    finally:
        if has_failed:
            leave_nothing(item)
        elif nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
            Shared.close_all()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `-n` a worker runs whole groups, in our order; `--dist` with another word than `load` is obeyed."""
    if config.getoption("dist") != "load":
        return None
    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


unit_test_runs = False


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if unit_test_runs and event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        raise RuntimeError(f"a unit test starts a process: {arguments[0]}; tests/tiers.py lists who may")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A unit test that starts a process fails, so that `make unit` stays quick."""
    global unit_test_runs  # noqa: PLW0603 - an audit hook cannot be taken away, and asks for this
    unit_test_runs = item.get_closest_marker("unit") is not None
    try:
        yield
    finally:
        unit_test_runs = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the engines' tests run their models: cpu, or cuda:0")
    parser.addoption("--redis-server", help="the server program of all tests and their meshes, called redis-server")
    parser.addoption("--redis-cluster", action="store_true", help="the shared server is a Cluster of three nodes")
    parser.addoption(
        "--hold-ups",
        metavar="MEAN_S,LONGEST_S",
        help="processes stand still now and then, as on a busy machine: the mean time between, and how long at most",
    )


def pytest_configure(config: pytest.Config) -> None:
    running_mesh.on_clusters = bool(config.getoption("--redis-cluster"))
    if program := config.getoption("--redis-server"):
        hiding = tempfile.TemporaryDirectory(prefix="seqmesh-tests-")
        config.add_cleanup(hiding.cleanup)
        use_server(Path(program), Path(hiding.name))
    if (how := config.getoption("--hold-ups")) and not hasattr(config, "workerinput"):
        try:
            hold_up_processes(how)
        except ValueError as error:
            raise pytest.UsageError(f"--hold-ups={how}: {error}") from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of the contract runs on both stores, unless it needs a server of its own."""
    module = metafunc.definition.path.relative_to(Path(__file__).parent).as_posix()
    fixtures = set(metafunc.fixturenames)
    if module in STORE_CONTRACT and "redis" in fixtures and "private_server" not in fixtures:
        metafunc.parametrize("store_kind", [SERVER, TWIN], indirect=True)


@pytest.fixture
def store_kind(request: pytest.FixtureRequest) -> str:
    """Which store this test runs on."""
    return getattr(request, "param", SERVER)


@pytest.fixture
def twin() -> Store:
    """An empty twin on the real clock."""
    return Store(lambda: time.time_ns() // 1000, random.Random(1), run_script)


@pytest.fixture(scope="session")
def shared_servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedRedis | EmbeddedCluster]:
    """The run's shared server; with `--redis-cluster` a Cluster."""
    folder, is_cluster = tmp_path_factory.mktemp("redis"), request.config.getoption("--redis-cluster")
    with EmbeddedCluster(folder) if is_cluster else EmbeddedRedis(folder) as servers:
        yield servers


@pytest.fixture(scope="session")
def redis_server(shared_servers: EmbeddedRedis | EmbeddedCluster) -> str:
    """URL of the run's shared server."""
    return shared_servers.url


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """The run's shared Cluster: three nodes, none of which is killed, nor taken for dead where it is slow."""
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), node_timeout_ms=60_000) as cluster:
        yield cluster


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """URL of the shared server, for settings and clients of one test; use together with `key_prefix`."""
    return redis_server


@pytest.fixture
def private_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A running server of the test's own, free to be killed, stopped and started again."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def private_cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """Three nodes of the test's own, free to be killed and started again."""
    with EmbeddedCluster(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture
def key_prefix(
    request: pytest.FixtureRequest, shared_servers: EmbeddedRedis | EmbeddedCluster, store_kind: str, twin: Store
) -> Iterator[str]:
    """A prefix no other test uses. Afterwards: fails on keys that would stay for ever, then removes all of them.

    A test that does not end its sequences says so: `@pytest.mark.leaves_sequences`.
    """
    prefix = f"t{uuid.uuid4().hex[:12]}"
    yield prefix
    sequences_may_live = has_marker(request, "leaves_sequences")
    if store_kind == TWIN:
        leaked = leaked_keys(StoreKeys(twin), prefix, sequences_may_live=sequences_may_live)
    else:
        leaked = list[str]()
        for server in shared_servers.nodes:
            with Redis.from_url(server.url) as client:
                leaked += leaked_keys(client, prefix, sequences_may_live=sequences_may_live)
                remove_keys(client, prefix)
                remove_libraries(client, prefix)
    assert leaked == [], "keys without TTL that docs/reference/keys.md does not call permanent"


@pytest.fixture
def chance() -> random.Random:
    """Chance of a test; its seed is printed when the test fails (captured output), and may be set here to repeat it."""
    seed = secrets.randbits(32)
    print(f"seed of this test's chance: {seed}")
    return random.Random(seed)


def has_marker(request: pytest.FixtureRequest, name: str) -> bool:
    """Whether the running test carries a marker."""
    node = cast("pytest.Item", request.node)
    return node.get_closest_marker(name) is not None


@pytest.fixture
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A running OTLP receiver; `environment()` gives the variables that make a process send its spans to it."""
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
async def redis(redis_server: str, store_kind: str, twin: Store) -> AsyncIterator[AsyncRedis]:
    """An async client of the shared server (or of the twin), as the mesh's own ones are; replies are bytes."""
    client = direct_client(Server(twin, loop_timer)) if store_kind == TWIN else connect(redis_server)
    yield client
    await client.aclose()
