"""The executor's composition root: connections, models, and one registration after another until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from executor.calls.client import CallClient
from executor.calls.gateways import Gateways
from executor.calls.watch import DeadlockWatch
from executor.connections import RedisConnections, insist
from executor.engine.mkl import ask_for_fixed_products
from executor.engine.python.calls import install
from executor.engine.python.process.environments import UNPACKED
from executor.lease.control import Control
from executor.lease.draining import Draining
from executor.lease.hung_calls import HungCallError
from executor.lease.registration import RENEWALS_PER_LEASE, Applied, LeaseLostError, OlderDataError, Registration
from executor.models.loader import START_S, Loader
from executor.models.polling import Polling, follow_listings
from executor.models.repository import ModelRepository, NoSuchModelError
from executor.models.sources import OVERRIDE, open_sources
from executor.models.version_maker import LoadOptions
from executor.settings import ExecutorSettings
from executor.workers.devices import DeviceLostError, find_devices
from shared.contract.errors import MeshError
from shared.process import interpreter, logs
from shared.process.lifecycle import Stop, Tasks, end
from shared.process.locked_folders import remove_abandoned
from shared.store.agreement import joined
from shared.store.company import Company
from shared.store.connections.fitness import value_bytes_max
from shared.store.connections.redis_client import connect
from shared.store.reading import tell
from shared.stored_settings import ProcessSettings, StoredSettings
from shared.traces.tracing import Tracing, setup

UNUSABLE_EXIT_CODE = 1
REACH_PAUSE_S = 2.0
"""Between two tries to read a repository at the start."""


async def serve(settings: ExecutorSettings, tasks: Tasks, stop: Stop) -> None:
    """Runs the executor until it is told to stop."""
    interpreter.share_often()
    settings = replace(settings, name=settings.name_of("executor"))
    async with joined(settings.redis_url, settings.key_prefix, settings.shards, name=settings.name) as (found, keys):
        bytes_max = await value_bytes_max(found)
    options: dict[str, Any] = {"name": settings.name, "timeout_ms": settings.redis_timeout_ms, "keys": keys}
    redis = partial(connect, settings.redis_url, retries=0, **options)
    connections = RedisConnections(lambda run: redis(run=run), keys, bytes_max)
    tracing = setup("executor", settings.name)
    remove_abandoned(OVERRIDE, UNPACKED)
    repository = open_repository(settings, bytes_max)
    stored_settings = StoredSettings(connections.commands, keys)
    process = ProcessSettings(stored_settings, tracing.control, logs.Level[settings.log_level.upper()])
    tasks.start(process.run(), name="settings")
    tasks.start(tell(connections.commands, keys), name="unreadable values")
    tasks.start(Company(connections.commands, keys, "executor", settings.name).run(), name="company")
    client = CallClient(
        Gateways(settings, connections.commands, keys),
        timeout_s=settings.call_timeout_secs,
        headers=settings.call_metadata,
    )
    tasks.start(DeadlockWatch(client, connections).run(), name="deadlocks")
    try:
        with install(client):
            await _serve(settings, connections, repository, tracing, client, tasks, stop)
    finally:
        # First: a model that waits for an answer would hold up the end of its instance.
        await client.close()
        await repository.close()
        # A call whose connection is closed under it logs that Redis has closed it.
        await tasks.end_all()
        await connections.close()
        await asyncio.to_thread(tracing.shutdown)


def open_repository(settings: ExecutorSettings, value_bytes_max: int) -> ModelRepository:
    """All models that these settings name. value_bytes_max: largest value that Redis takes. Raises MeshError (see
    `open_sources`).
    """
    return ModelRepository(
        open_sources(settings.models, settings.model_cache_dir.expanduser(), settings.model_cache_bytes),
        find_devices(settings.gpu),
        LoadOptions(
            config_name=settings.model_config_name,
            backend_dirs=settings.backend_directory,
            auto_complete=not settings.disable_auto_complete_config,
            completion_limit_s=settings.auto_complete_timeout_secs,
            metrics=settings.metrics,
            value_bytes_max=value_bytes_max,
            state_bytes_max=settings.state_bytes_max,
            call_limit_s=settings.batch_limit_s,
            reloads=settings.model_control_mode != "none",
        ),
    )


async def reach(repository: ModelRepository, stop: Stop) -> None:
    """Returns when every repository elsewhere has been read once, or this process is to stop. Before that it is not
    known which models there are, and which repository a name belongs to.

    raises  MeshError if asking again will not help
    """
    while not stop.requested:
        await asyncio.to_thread(repository.refresh)
        problems = repository.problems()
        if not problems:
            return
        if any(problem.lasting for problem in problems):
            raise MeshError("; ".join(map(str, problems)))
        logs.warning("waiting for model repositories", cause="; ".join(map(str, problems)))
        with suppress(TimeoutError):
            async with asyncio.timeout(REACH_PAUSE_S):
                await stop.wait()


async def _serve(
    settings: ExecutorSettings,
    connections: RedisConnections,
    repository: ModelRepository,
    tracing: Tracing,
    client: CallClient,
    tasks: Tasks,
    stop: Stop,
) -> None:
    changed = asyncio.Event()
    await reach(repository, stop)
    if await asyncio.to_thread(repository.mentions, "fixed_shape"):
        ask_for_fixed_products()
    loader = Loader(repository, connections, settings.name, stop, tasks, changed)
    # Redis may be restarted during loads, which may take minutes.
    following = asyncio.create_task(connections.follow(), name="server")
    try:
        applied = await start_models(settings, connections, repository, loader, changed, tasks)
    finally:
        await end((following,))
    stop.started()
    period_s = settings.lease_ms / 1000 / RENEWALS_PER_LEASE
    draining = Draining(connections.membership, settings.name, period_s=period_s)
    while await _is_wanted(connections, draining, stop):
        registration = Registration(
            settings, connections, repository, tracing, applied(), changed, calls=lambda: client.edges
        )
        draining.executor = registration.executor
        # Until it is over, or has left because of a stop or a drain.
        with client.replaying(registration.serving.owns):
            await first_of(_until_lost(registration, applied), _leave_when_told(registration, settings, draining, stop))


async def _is_wanted(connections: RedisConnections, draining: Draining, stop: Stop) -> bool:
    """Waits until this executor shall be in the mesh; False if it is to stop. It owns nothing meanwhile."""
    if not stop.requested:
        await first_of(draining.over(), stop.wait(), connections.follow())
    return not stop.requested


async def first_of(*works: Coroutine[Any, Any, None]) -> set[int]:
    """Runs coroutines until one has returned, and ends the others. Returns which have returned; raises what one
    raised.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
        return {index for index, task in enumerate(tasks) if task in done}
    finally:
        await end(tasks)


async def start_models(
    settings: ExecutorSettings,
    connections: RedisConnections,
    repository: ModelRepository,
    loader: Loader,
    changed: asyncio.Event,
    tasks: Tasks,
) -> Callable[[], Applied]:
    """Loads the models of the control mode, and starts the task that changes them later. Returns a function that tells
    which control messages were applied.
    """
    if settings.load_model and settings.model_control_mode != "explicit":
        remedy = "--model-control-mode explicit, or leave --load-model out"
        logs.warning("--load-model is ignored", model_control_mode=settings.model_control_mode, remedy=remedy)
    for folder in settings.backend_directory:
        if not folder.is_dir():
            logs.warning("--backend-directory is no folder", folder=str(folder), remedy="make it, or name another one")
    match settings.model_control_mode:
        case "explicit":
            logs.info("models are loaded on request", by="whoever gateways let", see="their --restricted-api")
            control = Control(connections, repository, loader, changed)
            # A model about which the mesh has a command follows that, not this process's command line.
            await load_models(repository, loader, settings, await insist("commands about models", control.commanded))
            await insist("commands about models", control.catch_up)
            tasks.start(control.run(), name="control")
            tasks.start(follow_listings(repository, settings.repository_poll_secs, changed), name="listings")
            return lambda: control.applied
        case "poll":
            polling = Polling(repository, loader, settings.repository_poll_secs, changed)
            await polling.look(_limit_at_start(settings))
            refuse_start(repository, settings)
            tasks.start(polling.run(), name="polling")
        case "none":
            await load_models(repository, loader, settings)
    return Applied


async def load_models(
    repository: ModelRepository, loader: Loader, settings: ExecutorSettings, but: Collection[str] = ()
) -> None:
    """Loads every model, or in explicit mode the named ones and those that they need. A model that fails is logged, and
    the index names the reason.

    but     models to leave alone
    raises  MeshError (see `refuse_start`)
    """
    names = start_names(repository, settings)
    # The list grows: an ensemble brings the models of its steps, as in Triton. They may be on other executors.
    for name in names:
        if name in but:
            continue
        logs.info("loading model", model=name)
        try:
            loaded = await loader.load(name, limit_s=_limit_at_start(settings))
        except MeshError as error:
            logs.error("model not loaded", model=name, cause=error.message)
            if isinstance(error, NoSuchModelError):
                repository.never_found(name, error.message)
            continue
        if steps := {step.model for step in loaded.record.config.ensemble}:
            names += sorted(steps.intersection(repository.names()).difference(names))
    refuse_start(repository, settings)


def _limit_at_start(settings: ExecutorSettings) -> float | None:
    """How long a load of the start is waited for (see `Loader.load`): `--exit-on-error` must know how each ends."""
    return None if settings.exit_on_error else START_S


def start_names(repository: ModelRepository, settings: ExecutorSettings) -> list[str]:
    if settings.model_control_mode == "explicit" and "*" not in settings.load_model:
        return list(settings.load_model)
    return repository.names()


def refuse_start(repository: ModelRepository, settings: ExecutorSettings) -> None:
    """Raises MeshError if the start has failed: a model could not be loaded and `--exit-on-error` was given; or, in
    mode `none`, no model at all could be loaded: such an executor would only look alive.
    """
    failed = sorted(repository.failures)
    if settings.exit_on_error and failed:
        reasons = "; ".join(f"{name}: {repository.failures[name].reason}" for name in failed)
        raise MeshError(f"failed to load all models: {reasons}")
    if failed and not repository.loaded and not repository.loading and settings.model_control_mode == "none":
        raise MeshError(f"none of the {len(failed)} models in {', '.join(map(str, settings.models))} could be loaded")


async def _until_lost(registration: Registration, applied: Callable[[], Applied]) -> None:
    try:
        await registration.run(applied)
    except* LeaseLostError:
        logs.warning("lease lost", executor=registration.executor, remedy="registering anew under another id")
    except* OlderDataError:
        logs.error("redis holds older data", executor=registration.executor, remedy="registering anew under another id")
    except* HungCallError:
        _end_at_once(registration, "a thread that hangs cannot be stopped")
    except* DeviceLostError:
        _end_at_once(registration, "this process gets its GPU back by starting anew")


def _end_at_once(registration: Registration, because: str) -> None:
    """Ends the process without waiting for its threads or closing its engines."""
    logs.error(f"ending: {because}", executor=registration.executor, exit_code=UNUSABLE_EXIT_CODE)
    logging.shutdown()
    # Not sys.exit: that waits for threads, and the thread that hangs never ends.
    os._exit(UNUSABLE_EXIT_CODE)


async def _leave_when_told(
    registration: Registration, settings: ExecutorSettings, draining: Draining, stop: Stop
) -> None:
    """Leaves when told to. A drain has any time until a stop comes; a stop has its time limit even without Redis."""
    await first_of(stop.wait(), draining.begun())
    returned = await first_of(_leave(registration, settings, stop), _after(stop, settings.drain_timeout_s))
    if 0 not in returned:
        logs.warning("stopped before it could leave, giving the lease up", executor=registration.executor)
        await registration.give_up()


async def _after(stop: Stop, seconds: float) -> None:
    """Returns `seconds` after a stop was requested."""
    await stop.wait()
    await asyncio.sleep(seconds)


async def _leave(registration: Registration, settings: ExecutorSettings, stop: Stop) -> None:
    """Leaves. Half of a stop's time is for sequences that can end only here."""
    await registration.registered.wait()
    stayed = await registration.settle(_after(stop, settings.drain_timeout_s / 2))
    try:
        async with asyncio.timeout(settings.drain_timeout_s / 2 if stayed else settings.drain_timeout_s):
            await registration.leave()
    except TimeoutError:
        logs.warning("drain timed out", executor=registration.executor, seconds=settings.drain_timeout_s)
        await registration.give_up()
