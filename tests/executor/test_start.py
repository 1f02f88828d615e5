"""What an executor loads at its start, and when it had better not start."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import click
import pytest

from executor import service
from executor.connections import RedisConnections
from executor.models.loader import START_S, Loader
from executor.models.repository import ModelRepository
from executor.models.served import LoadedModel
from executor.service import _leave_when_told, load_models, start_models
from executor.settings import ExecutorSettings, ModelControlMode
from executor.workers.devices import Devices
from shared.contract.errors import MeshError
from shared.process.lifecycle import Stop, Tasks
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.membership import Member, Membership
from shared.traces.tracing import Tracing
from tests.embedded_redis import EmbeddedRedis
from tests.executor.living import SHARDS
from tests.mesh.model_repository import SAMPLES


@pytest.fixture
async def repository(tmp_path: Path) -> AsyncIterator[ModelRepository]:
    """One good model and one broken one."""
    for name in ("good", "broken"):
        shutil.copytree(SAMPLES / "add_sub", tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        config = tmp_path / name / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "add_sub"', ""))
    (tmp_path / "broken" / "1" / "model.py").write_text("raise ValueError('it is broken')")
    repository = ModelRepository((tmp_path,), Devices())
    yield repository
    await repository.close()


@pytest.mark.parametrize(
    "setting",
    [
        {"gpu": "cuda:0"},
        {"gpu": "-1"},
        {"gpu": "0-3"},
        {"calls_through": ("localhost:8001",)},
        {"calls_through": ("grpc://localhost:8001", "grpcs://")},
        {"call_header": ("token",)},
    ],
)
def test_a_text_that_means_nothing_is_refused_before_anything_begins(setting: dict[str, Any]) -> None:
    option = f"--{next(iter(setting))} must be".replace("_", "-")

    with pytest.raises(click.UsageError, match=option):
        ExecutorSettings(**setting)


async def test_a_broken_model_stands_in_the_index_and_the_others_serve(
    repository: ModelRepository, loader: Loader, tmp_path: Path
) -> None:
    await load_models(repository, loader, ExecutorSettings(models=(tmp_path,)))

    assert ["good"] == list(repository.loaded)
    (line,) = [line for line in repository.index(repository.listed(readable_alone=True)) if line.model == "broken"]
    assert ("1", "UNAVAILABLE") == (line.version, line.state)
    assert "it is broken" in line.reason


async def test_a_model_that_hangs_at_the_start_keeps_no_other_from_being_served(
    repository: ModelRepository, loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, really_load = threading.Event(), ModelRepository.load

    def load(self: ModelRepository, name: str, *more: Any) -> LoadedModel:
        if name == "broken":
            assert gate.wait(60)
        return really_load(self, name, *more)

    async def has_ended(task: asyncio.Task[Any], _: float | None) -> bool:
        """Patient with all but the one that hangs."""
        if "broken" not in task.get_name():
            await asyncio.wait([task])
        return task.done()

    monkeypatch.setattr(ModelRepository, "load", load)
    monkeypatch.setattr("executor.models.loader._has_ended", has_ended)
    await load_models(repository, loader, ExecutorSettings(models=(tmp_path,)))

    assert ["good"] == list(repository.loaded)
    gate.set()


@pytest.mark.parametrize("mode", ["none", "poll"])
@pytest.mark.parametrize(("exit_on_error", "limit_s"), [(True, None), (False, START_S)])
async def test_a_start_that_is_to_fail_with_any_load_waits_for_each(
    repository: ModelRepository, tmp_path: Path, mode: ModelControlMode, limit_s: float | None, *, exit_on_error: bool
) -> None:
    loader = Mock(Loader)
    loader.goes_on.return_value = False
    settings = ExecutorSettings(models=(tmp_path,), model_control_mode=mode, exit_on_error=exit_on_error)
    nothing: Any = None

    def not_run(work: Coroutine[Any, Any, None], **_: str) -> None:
        work.close()

    tasks = cast("Any", SimpleNamespace(start=not_run))
    await start_models(settings, nothing, repository, loader, asyncio.Event(), tasks)

    assert [limit_s] * 2 == [call.kwargs["limit_s"] for call in loader.load.await_args_list]


async def test_exit_on_error_ends_the_start_and_so_does_having_no_model_at_all(
    repository: ModelRepository, loader: Loader, tmp_path: Path
) -> None:
    settings = ExecutorSettings(models=(tmp_path,))
    with pytest.raises(MeshError, match=r"failed to load all models: broken: .*it is broken"):
        await load_models(repository, loader, replace(settings, exit_on_error=True))

    repository.unload("good")
    shutil.rmtree(tmp_path / "good")
    with pytest.raises(MeshError, match="could be loaded"):
        await load_models(repository, loader, settings)


async def test_a_name_that_no_repository_has_stands_in_the_index_of_the_executor_that_was_to_load_it(
    repository: ModelRepository, loader: Loader, tmp_path: Path
) -> None:
    settings = ExecutorSettings(models=(tmp_path,), model_control_mode="explicit", load_model=("good", "goood"))
    await load_models(repository, loader, settings)

    (line,) = [line for line in repository.index(repository.listed(readable_alone=True)) if line.model == "goood"]
    assert "UNAVAILABLE" == line.state
    assert "no repository has a folder of that name" in line.reason
    with pytest.raises(MeshError, match="failed to load all models: goood: "):
        await load_models(repository, loader, replace(settings, exit_on_error=True))


async def test_names_to_load_outside_explicit_mode_are_ignored_with_a_warning(
    repository: ModelRepository, loader: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ExecutorSettings(models=(tmp_path,), load_model=("broken",))
    nothing: Any = None
    await start_models(settings, nothing, repository, loader, asyncio.Event(), nothing)

    assert ["good"] == list(repository.loaded)
    assert "--load-model is ignored" in caplog.messages


async def test_a_backend_directory_that_is_not_there_is_warned_of(
    repository: ModelRepository, loader: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ExecutorSettings(models=(tmp_path,), backend_directory=(tmp_path, tmp_path / "nowhere"))
    nothing: Any = None
    await start_models(settings, nothing, repository, loader, asyncio.Event(), nothing)

    assert ["good"] == list(repository.loaded)
    assert 1 == caplog.messages.count("--backend-directory is no folder")


async def test_explicit_mode_loads_what_was_named_unless_the_mesh_has_had_another_word(
    repository: ModelRepository, loader: Loader, tmp_path: Path
) -> None:
    settings = ExecutorSettings(models=(tmp_path,), model_control_mode="explicit", load_model=("good",))
    await load_models(repository, loader, settings, but={"good"})
    assert [] == list(repository.loaded)

    await load_models(repository, loader, replace(settings, load_model=()))
    assert [] == list(repository.loaded)
    await load_models(repository, loader, settings)
    assert ["good"] == list(repository.loaded)
    await load_models(repository, loader, replace(settings, load_model=("*",)), but={"good"})
    assert ["broken"] == list(repository.failures)


@asynccontextmanager
async def served(url: str, keys: Keyspace, repository: ModelRepository) -> AsyncGenerator[list[Member]]:
    """Runs an executor that loads `good`, which is registered. Afterwards it has stopped."""
    stop, no_calls = Stop(), SimpleNamespace(edges=(), replaying=nullcontext)
    settings = ExecutorSettings(model_control_mode="explicit", load_model=("good",), name="a")
    connections = RedisConnections(lambda run: connect(url, retries=0, run=run), keys)
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        serving = service._serve(settings, connections, repository, Tracing(None), cast(Any, no_calls), tasks, stop)
        task = tasks.start(serving, name="executor")
        async with asyncio.timeout(60), connect(url) as redis:
            while not (members := await Membership(redis, keys).members()) and not task.done():
                await asyncio.sleep(0.01)
        yield members
        stop.request("the end of the test")
        await task
        await tasks.end_all()
    await connections.close()


async def test_a_redis_that_is_restarted_while_models_load_does_not_end_the_start(
    repository: ModelRepository, private_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load may take minutes. The commands about models are asked for after it."""

    async def load_over_a_restart(*args: Any) -> None:
        private_server.stop()
        private_server.start()
        await load_models(*args)

    monkeypatch.setattr(service, "load_models", load_over_a_restart)
    async with served(private_server.url, Keyspace("restarted", SHARDS), repository) as members:
        assert ["good"] == [served.model for member in members for served in member.registration.models]


async def test_a_model_of_the_registration_before_that_ends_slowly_does_not_hold_up_the_next(
    repository: ModelRepository, redis_url: str, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def close_retired(*_: object) -> None:
        await ended.wait()

    with monkeypatch.context() as slow:
        slow.setattr(ModelRepository, "close_retired", close_retired)
        async with served(redis_url, Keyspace(key_prefix, SHARDS), repository) as members:
            assert ["a"] == [member.registration.name for member in members]
            ended.set()


async def test_its_tasks_end_before_the_connections_that_they_use(
    redis_url: str, key_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one of them could log that Redis has closed its connection, at the end of an executor that was told to."""
    ended, really_close = list[str](), RedisConnections.close

    async def watch(_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("deadlocks")

    async def serve_nobody(*_: object) -> None:
        await asyncio.sleep(0)

    async def close(connections: RedisConnections) -> None:
        ended.append("connections")
        await really_close(connections)

    monkeypatch.setattr(service.DeadlockWatch, "run", watch)
    monkeypatch.setattr(service, "_serve", serve_nobody)
    monkeypatch.setattr(RedisConnections, "close", close)
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        settings = ExecutorSettings(redis_url=redis_url, key_prefix=key_prefix, models=(tmp_path,), name="a")
        await service.serve(settings, tasks, Stop())
        await tasks.end_all()

    assert ["deadlocks", "connections"] == ended


class Hangs:
    """In place of a registration: a model's batch does not return, so it cannot leave."""

    executor = "a-1"

    def __init__(self) -> None:
        self.registered = asyncio.Event()
        self.registered.set()
        self.given_up = 0

    async def settle(self, until: Coroutine[Any, Any, None]) -> bool:
        until.close()
        return False

    async def leave(self) -> None:
        await asyncio.Event().wait()

    async def give_up(self) -> None:
        self.given_up += 1


@pytest.mark.parametrize("told", ["stop", "drain"])
async def test_an_executor_that_cannot_leave_in_time_gives_its_lease_up(told: str) -> None:
    """So the sequences of its other models go on elsewhere at once."""
    stop, hangs = Stop(), Hangs()
    if told == "stop":
        stop.request("SIGTERM")

    async def begun() -> None:
        if told == "stop":
            await asyncio.Event().wait()

    registration: Any = hangs
    draining: Any = SimpleNamespace(begun=begun)
    async with asyncio.timeout(60):
        await _leave_when_told(registration, ExecutorSettings(drain_timeout_s=0.05), draining, stop)

    assert 1 == hangs.given_up
