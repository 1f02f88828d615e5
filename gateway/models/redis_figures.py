"""What Redis tells of itself: memory, clients, processor, time of commands. Read at each scrape, with one command to
each server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import NoPermissionError

from shared.store.commands import Redis
from shared.store.connections.fitness import NO_EVICTION
from shared.store.connections.redis_py import CONNECTION_LOST

SECTIONS = ("server", "clients", "memory", "persistence", "cpu", "commandstats")
COMMAND = "cmdstat_"


@dataclass(frozen=True, slots=True)
class CommandUse:
    """One command since the server began: how often it was run, and the server's time for it.

    A script's commands count by themselves, and their time in the script's as well.
    """

    calls: int
    us: int


@dataclass(frozen=True, slots=True)
class RedisFigures:
    """One reading.

    memory_max   bytes beyond which the server refuses new work; 0: no bound
    cpu_s        processor time of the thread that runs the commands
    log_written  whether the append-only file was written the last time; None: the server keeps none
    log_rewritten  whether the last attempt to write it anew, without what is over, succeeded; None: as above
    evicts       whether the server drops keys where it has no memory left: live sequences, then
    """

    memory_used: int
    memory_max: int
    clients: int
    uptime_s: int
    cpu_s: float
    log_written: bool | None
    log_rewritten: bool | None
    evicts: bool = False
    commands: Mapping[str, CommandUse] = field(default_factory=dict[str, CommandUse])


async def read_figures(redis: Redis, within_s: float | None = None) -> Mapping[str, RedisFigures]:
    """The servers now, by the address of the node, "" of an only one; without those whose user may not ask. A node of a
    Cluster that does not answer is left out, too. Raises one of CONNECTION_LOST if none answers.

    within_s  how long a server may take; None: as long as any command
    """
    servers = await redis.servers()
    asked = (_told(server, within_s) for server in servers.values())
    told = await asyncio.gather(*asked, return_exceptions=True)
    figures: dict[str, RedisFigures] = {}
    for address, info in zip(servers, told, strict=True):
        if not isinstance(info, BaseException):
            figures[address] = figures_of(info)
        elif not isinstance(info, (NoPermissionError, *CONNECTION_LOST)):
            raise info
    lost = [info for info in told if isinstance(info, CONNECTION_LOST)]
    if lost and not figures:
        raise lost[0]
    return figures


async def _told(server: Redis, within_s: float | None) -> Mapping[str, Any]:
    async with asyncio.timeout(within_s):
        return await server.info(*SECTIONS)


def figures_of(info: Mapping[str, Any]) -> RedisFigures:
    """What INFO says. Subcommands count with their command: there are as many names as the server has commands."""
    commands: dict[str, CommandUse] = {}
    for name, told in info.items():
        if name.startswith(COMMAND):
            command = name.removeprefix(COMMAND).partition("|")[0]
            before = commands.get(command, CommandUse(0, 0))
            commands[command] = CommandUse(before.calls + int(told["calls"]), before.us + int(told["usec"]))
    # Systems other than Linux know the whole process alone.
    thread = "_main_thread" if "used_cpu_user_main_thread" in info else ""
    keeps_log = bool(int(info.get("aof_enabled", 0)))
    return RedisFigures(
        memory_used=int(info["used_memory"]),
        memory_max=int(info.get("maxmemory", 0)),
        clients=int(info["connected_clients"]),
        uptime_s=int(info["uptime_in_seconds"]),
        cpu_s=float(info[f"used_cpu_user{thread}"]) + float(info[f"used_cpu_sys{thread}"]),
        log_written=info["aof_last_write_status"] == "ok" if keeps_log else None,
        log_rewritten=info["aof_last_bgrewrite_status"] == "ok" if keeps_log else None,
        evicts=info.get("maxmemory_policy", NO_EVICTION) != NO_EVICTION,
        commands=commands,
    )
