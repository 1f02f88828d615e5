"""The executor's composition root: connections, models, and one incarnation after another until told to stop."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from executor.control import Control
from executor.devices import find_devices
from executor.incarnation import Connections, Incarnation, LeaseLostError
from executor.repository import Repository
from executor.settings import ExecutorSettings
from shared import logs
from shared.errors import MeshError
from shared.keyspace import Keyspace
from shared.lifecycle import Stop, Tasks
from shared.redis_client import connect, join_mesh
from shared.tracing import Tracing, setup

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter: the default, 5 ms, lets a model's thread hold up the step loop."""


async def serve(settings: ExecutorSettings, tasks: Tasks, stop: Stop) -> None:
    """Runs the executor until it is told to stop."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    settings = replace(settings, name=settings.name_of("executor"))
    keys = Keyspace(settings.key_prefix, settings.shards)
    patient = connect(settings.redis_url)
    await join_mesh(patient, keys)
    await patient.aclose()
    connections = Connections(connect(settings.redis_url, retries=0), connect(settings.redis_url, retries=0), keys)
    tracing = setup("executor", settings.name)
    repository = Repository(settings.models, find_devices(settings.gpu))
    try:
        await asyncio.to_thread(load_models, repository, settings)
        await _serve(settings, connections, repository, tracing, tasks, stop)
    finally:
        await repository.close()
        await connections.close()
        await asyncio.to_thread(tracing.shutdown)


def load_models(repository: Repository, settings: ExecutorSettings) -> None:
    """Loads what the control mode says: everything, or what was named. A model that fails is logged and stands in the
    index; an executor without any model would only look alive, so in mode `none` that is an error."""
    names = repository.names()
    if settings.model_control_mode == "explicit" and "*" not in settings.load_model:
        names = list(settings.load_model)
    for name in names:
        logs.info("loading model", model=name)
        try:
            repository.load(name)
        except MeshError as error:
            logs.error("model not loaded", model=name, cause=error.message)
    if names and not repository.loaded and settings.model_control_mode == "none":
        raise MeshError(f"none of the {len(names)} models in {', '.join(map(str, settings.models))} could be loaded")


async def _serve(
    settings: ExecutorSettings,
    connections: Connections,
    repository: Repository,
    tracing: Tracing,
    tasks: Tasks,
    stop: Stop,
) -> None:
    control = Control(connections, repository)
    if settings.model_control_mode == "explicit":
        await control.catch_up()
        tasks.start(control.run(), name="control")
    while not stop.requested:
        incarnation = Incarnation(settings, connections, repository, tracing, control.position)
        await _live(incarnation, control, repository, settings, stop)


async def _live(
    incarnation: Incarnation, control: Control, repository: Repository, settings: ExecutorSettings, stop: Stop
) -> None:
    """One incarnation: until its lease is lost (returns), or the stop (drains, returns)."""
    life = asyncio.create_task(_until_lost(incarnation), name="incarnation")
    announcements = asyncio.create_task(_announce(incarnation, control, repository), name="announcements")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        done, _ = await asyncio.wait({life, announcements, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
        if not life.done():
            await _leave(incarnation, settings)
    finally:
        for task in (life, announcements, stopping):
            task.cancel()
        await asyncio.gather(life, announcements, stopping, return_exceptions=True)


async def _until_lost(incarnation: Incarnation) -> None:
    try:
        await incarnation.run()
    except* LeaseLostError:
        logs.warning("lease lost", executor=incarnation.executor, remedy="registering anew under another id")


async def _leave(incarnation: Incarnation, settings: ExecutorSettings) -> None:
    try:
        async with asyncio.timeout(settings.drain_timeout_s):
            await incarnation.leave()
    except TimeoutError:
        logs.warning("drain timed out", executor=incarnation.executor, seconds=settings.drain_timeout_s)


async def _announce(incarnation: Incarnation, control: Control, repository: Repository) -> None:
    """Tells the mesh of loaded and unloaded models; only then are the old engines idle and can be closed."""
    while True:
        await control.changed.wait()
        control.changed.clear()
        await incarnation.announce(control.position)
        await repository.close_retired()
