"""`seqmesh doctor`: looks at this machine, at Redis and at the mesh, and says the remedy for what is not well."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import statistics
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, cast

import click
import msgspec
from redis.exceptions import NoPermissionError, ResponseError

from deploy.local.data_directory import MeshState, has_state, read_state
from deploy.local.embedded import family_of
from deploy.local.readiness import NO_EXECUTOR, unreadiness
from deploy.local.settings import UpSettings
from deploy.local.terminal import styled
from deploy.operate import diagnoses
from deploy.operate.diagnoses import Diagnosis, ServerFacts, Severity
from deploy.operate.operating import NotServingError, OperatedMesh, RedisRefusesError, connected, found_mesh, located
from deploy.operate.settings import OperatorSettings, escaped, operator_command
from shared.settings import parse_settings
from shared.store.commands import Redis
from shared.store.company import services
from shared.store.connections.cluster_redis import ClusterRedis, shards_of_cluster
from shared.store.connections.fitness import POLICIES, SENTINEL_MODE
from shared.store.connections.redis_client import redis_now_ms, server_urls
from shared.store.waiting_line import read_lines, read_live

PINGS = 9
NOT_SERVING_REMEDY = "LOADING: wait until it has read its file; BUSY: redis-cli SCRIPT KILL; else look into its log"
REFUSED_REMEDY = "correct the URL's user and password, or give that user its rights: docs/guides/redis.md"
DOWN = b"cluster_state:fail"
"""What CLUSTER INFO of a node says that refuses commands."""
COLOURS = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "red"}
HELP = """Looks at this machine, at Redis and at the mesh, and names the remedy for what is not well.

Without a mesh in --data-dir and without --redis-url, it looks at this machine alone: whether `seqmesh up` would find
what it needs. Changes nothing. The exit status is 1 if something fails, else 0.

\b
  seqmesh doctor        this machine, and the mesh of `seqmesh up` in it
  seqmesh doctor --redis-url redis://redis:6379    a mesh elsewhere
"""


async def run(settings: OperatorSettings, *, as_json: bool) -> None:
    """Ends with status 1 if a diagnosis fails."""
    is_here = has_state(settings.data_dir)
    found = list(of_machine())
    if is_here or not settings.redis_url:  # Nothing of a mesh elsewhere is kept on this machine.
        found.append(of_disk(settings.data_dir))
    if is_here or settings.redis_url:
        found += await of_mesh(settings)
    else:
        found += diagnoses.of_ports(ports_of_up())
        found.append(diagnoses.of_no_mesh(str(settings.data_dir), can_keep_data=can_keep_data(settings.data_dir)))
    click.echo(json.dumps([msgspec.to_builtins(one) for one in found]) if as_json else report(found))
    if any(one.severity is Severity.FAIL for one in found):
        raise click.exceptions.Exit(1)


def report(found: list[Diagnosis]) -> str:
    """The diagnoses as lines; a remedy stands below its diagnosis."""
    width = max(len(one.subject) for one in found)
    lines: list[str] = []
    for one in found:
        severity = styled(f"{one.severity:<4}", fg=COLOURS[one.severity])
        lines.append(f"{severity}  {one.subject:<{width}}  {escaped(one.text)}")
        if one.remedy:
            # The reason why a model is not loaded is the model's own: it may have several lines, and any characters.
            remedy = textwrap.indent(escaped(one.remedy.strip()), " " * (width + 11)).lstrip()
            lines.append(f"{'':<{width + 8}}-> {remedy}")
    bad = [sum(one.severity is severity for one in found) for severity in (Severity.FAIL, Severity.WARN)]
    return "\n".join([*lines, "", f"{len(found)} diagnoses: {bad[0]} failed, {bad[1]} to look at"])


# -- the mesh --------------------------------------------------------------------------------------------------------


async def of_mesh(settings: OperatorSettings) -> list[Diagnosis]:
    """Diagnoses of Redis, the services and the models. What cannot be reached is a diagnosis too."""
    found: list[Diagnosis] = []
    try:
        facts, lost = await facts_of_servers(located(settings)[0])
        found += lost
        for address, told in facts.items():
            found += diagnoses.of_node(address, [diagnoses.of_fitness(told.info, of_cluster=bool(address))])
        if any(one.severity is Severity.FAIL for one in found[len(lost) :]):  # no mesh can be in it
            return found
        for address, told in facts.items():
            found += diagnoses.of_node(address, diagnoses.of_server(told))
        found += diagnoses.of_cluster(facts)
        if facts and all(diagnoses.of_refused_writes(told) for told in facts.values()):
            return found  # whoever lives cannot say so, and would be taken for dead
        async with found_mesh(settings) as mesh:
            if not lost:
                found += await of_use(mesh, facts)
            found += await of_members(mesh, are_all_there=not lost)
        if not settings.redis_url:
            found += await of_gateways(read_state(settings.data_dir))
    except NotServingError as error:
        found.append(diagnoses.fail("redis", error.message, NOT_SERVING_REMEDY))
    except RedisRefusesError as error:
        found.append(diagnoses.fail("redis", error.message, REFUSED_REMEDY))
    except click.ClickException as error:
        remedy = (
            "start it, or give another --redis-url: docs/guides/redis.md"
            if settings.redis_url
            else f"if `seqmesh up` has ended, start it; else look into {settings.data_dir}/logs"
        )
        found.append(diagnoses.fail("mesh", error.message, remedy))
    return found


async def facts_of_servers(url: str) -> tuple[dict[str, ServerFacts], list[Diagnosis]]:
    """What each server told, by the address of its node, "" of an only one; and a diagnosis of each node that cannot be
    reached. Raises click.ClickException for an only server, and where no node tells which there are.
    """
    async with connected(url, retries=0):
        servers = await server_urls(url)
    facts: dict[str, ServerFacts] = {}
    lost: list[Diagnosis] = []
    for address, server in servers.items():
        try:
            async with connected(server, retries=0) as redis:
                facts[address] = await server_facts(redis)
        except click.ClickException as error:
            if not address:
                raise
            lost += diagnoses.of_node(address, [diagnoses.of_lost_node(error.message)])
    return facts, lost


async def server_facts(redis: Redis) -> ServerFacts:
    """Asks a server. Raises what redis-py raises."""
    info: dict[str, Any] = {}
    with suppress(NoPermissionError):
        info = await redis.info()
    if info.get("redis_mode") == SENTINEL_MODE:  # it knows none of the other commands
        return ServerFacts(info, {}, 0, 0)
    took: list[float] = []
    skews: list[float] = []
    for _ in range(PINGS):
        began, before = time.monotonic(), time.time()
        seconds, micros = await redis.time()
        took.append((time.monotonic() - began) * 1000)
        skews.append((seconds + micros / 1e6 - before) * 1000 - took[-1] / 2)
    config: dict[str, str] = {}
    with suppress(ResponseError):
        config = await redis.config_get(*POLICIES)
    cluster = b""
    if int(info.get("cluster_enabled", 0)):
        with suppress(NoPermissionError):
            cluster = await cast("Any", redis).execute_command("CLUSTER", "INFO")
    return ServerFacts(info, config, statistics.median(took), statistics.median(skews), is_whole=DOWN not in cluster)


async def of_use(mesh: OperatedMesh, nodes: Mapping[str, ServerFacts]) -> Iterable[Diagnosis]:
    """Diagnoses of the nodes that the mesh does not use; none of a server that is no Cluster's."""
    if not isinstance(mesh.redis, ClusterRedis):
        return ()
    mesh.redis.know(mesh.keys.bases())
    return diagnoses.of_unused_nodes(
        nodes.keys() - (await mesh.redis.servers()).keys(), len(await shards_of_cluster(mesh.redis))
    )


async def of_members(mesh: OperatedMesh, *, are_all_there: bool) -> list[Diagnosis]:
    """Diagnoses of the services and models of a mesh. Which sequences wait only all nodes of a Cluster tell."""
    members = await mesh.membership.members()
    records = await mesh.membership.models()
    led = {
        model: bool(await mesh.redis.exists(mesh.keys.leader(model)))
        for model, record in records.items()
        if record.config.sequence_batching is not None
    }
    with_leader = sorted(model for model, has_leader in led.items() if has_leader)
    lines = await read_lines(mesh.redis, mesh.keys, with_leader) if are_all_there else {}
    live = await read_live(mesh.redis, mesh.keys, sorted(led)) if are_all_there else {}
    told = await services(mesh.redis, mesh.keys)
    schedulers = {line.name for line in told if line.service == "scheduler"}
    dead = [name for name in schedulers if not await mesh.redis.exists(mesh.keys.scheduler(name))]
    return [
        *diagnoses.of_services(told, await redis_now_ms(mesh.redis), dead),
        *diagnoses.of_executors(members, await mesh.membership.drained()),
        *diagnoses.of_leaders(led),
        *diagnoses.of_models(members, lines, live),
    ]


async def of_gateways(mesh: MeshState) -> list[Diagnosis]:
    """Diagnoses of the gateways of `seqmesh up` that do not answer: in Redis one that was lost lives for a minute."""
    gateways = [child for child in mesh.children if child.service == "gateway"]
    reasons = await asyncio.gather(*(unreadiness(mesh.host, gateway.metrics_port) for gateway in gateways))
    return [
        diagnoses.fail(gateway.name, reason, f"look into {gateway.log}")
        for gateway, reason in zip(gateways, reasons, strict=True)
        if reason not in ("", NO_EXECUTOR)  # the executors have diagnoses of their own
    ]


# -- this machine ----------------------------------------------------------------------------------------------------


def of_machine() -> Iterator[Diagnosis]:
    """Diagnoses of this machine, whatever runs on it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield diagnoses.of_open_files(-1 if limit == resource.RLIM_INFINITY else limit)
    yield diagnoses.of_gpus(*gpus(), installed("torch"))


def of_disk(data_dir: Path) -> Diagnosis:
    """Whether there is room where `seqmesh up` keeps its data, or would."""
    # Not by the paths' own method, which raises where this user may not look.
    where = next(folder for folder in (data_dir, *data_dir.absolute().parents) if os.path.isdir(folder))  # noqa: PTH112
    return diagnoses.of_disk(shutil.disk_usage(where).free, str(where))


def can_keep_data(data_dir: Path) -> bool:
    """Whether `seqmesh up` may write into a folder, or make it."""
    there = next(path for path in (data_dir, *data_dir.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def gpus() -> tuple[list[str], str]:
    """Names of the machine's GPUs, and why they could not be asked."""
    if not any(Path(trace).exists() for trace in ("/proc/driver/nvidia", "/dev/nvidiactl")):
        return [], ""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return [], "there is an NVIDIA driver, but nothing to ask it with (package nvidia-ml-py)"
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [str(nvml.nvmlDeviceGetName(handle)) for handle in handles], ""
    except nvml.NVMLError as error:
        return [], f"the NVIDIA driver does not answer: {error}"


def installed(distribution: str) -> str:
    """The version of a distribution; "" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def ports_of_up() -> list[tuple[str, int, str]]:
    """The ports on which `seqmesh up` would listen in this environment, for `diagnoses.of_ports`.

    Ends as `seqmesh up` does where the environment has a wrong value.
    """
    settings = parse_settings(UpSettings, [], program="seqmesh up", help="")
    ports = {
        "--http-port": settings.http_port,
        "--grpc-port": settings.grpc_port,
        "--metrics-port": settings.metrics_port,
        "--console-port": settings.console_port if settings.console else 0,
    }
    # 0: none, or any that is free.
    return [(option, port, port_problem(settings.host, port)) for option, port in ports.items() if port]


def port_problem(host: str, port: int) -> str:
    """Why this port cannot be listened on; "" if it can."""
    with socket.socket(family_of(host)) as listener:
        # As servers do, so that connections of a server that has just ended do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


command = operator_command(
    "doctor", HELP, run, [click.Option(["--json", "as_json"], is_flag=True, help="The diagnoses as JSON.")]
)
