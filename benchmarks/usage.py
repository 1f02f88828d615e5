"""Measures what a window of load costs: CPU time of each process, and commands and bytes of Redis."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
from redis import Redis

CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment. cpu_s: seconds by group; machine_busy_s: of all cores; redis: see `redis_counters`."""

    at_s: float
    cpu_s: Mapping[str, float]
    machine_busy_s: float
    redis: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RedisCost:
    """Per step: commands (those inside scripts too), scripts, bytes in and out on the wire, bytes appended to the file.

    by_command  calls per step of each command, most first
    """

    commands: float
    scripts: float
    bytes_in: float
    bytes_out: float
    file_bytes: float
    by_command: dict[str, float]


class Meter:
    """Reads the counters of one server's processes and of this one, the client.

    groups     process ids by the name they are reported under; their children count too
    redis_url  None for a server without Redis
    """

    def __init__(self, groups: Mapping[str, Iterable[int]], redis_url: str | None) -> None:
        all_groups = {**groups, CLIENT: [os.getpid()]}
        self._groups = {
            name: [process for pid in pids for process in family(pid, children=name != CLIENT)]
            for name, pids in all_groups.items()
        }
        self._redis = Redis.from_url(redis_url) if redis_url else None
        self.readings: list[Reading] = []

    def read(self) -> None:
        redis = redis_counters(self._redis) if self._redis is not None else {}
        cpu_s = {name: sum(map(cpu_seconds, processes)) for name, processes in self._groups.items()}
        self.readings.append(Reading(time.perf_counter(), cpu_s, machine_busy_s(), redis))

    def close(self) -> None:
        """Ends the connection to Redis."""
        if self._redis is not None:
            self._redis.close()


def family(pid: int, *, children: bool) -> list[psutil.Process]:
    """A process and, if wanted, all that descend from it."""
    process = psutil.Process(pid)
    return [process, *(process.children(recursive=True) if children else [])]


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time so far; 0 for a process that has ended meanwhile."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def machine_busy_s() -> float:
    """Time that all cores together have not been idle."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)


def redis_counters(redis: Redis) -> dict[str, float]:
    """Calls by command ("calls:xadd"), bytes on the wire, size of the append-only file."""
    info: dict[str, Any] = redis.info("all")
    prefix = "cmdstat_"
    calls = {f"calls:{k.removeprefix(prefix)}": float(v["calls"]) for k, v in info.items() if k.startswith(prefix)}
    return {
        **calls,
        "bytes_in": float(info["total_net_input_bytes"]),
        "bytes_out": float(info["total_net_output_bytes"]),
        "file_bytes": float(info.get("aof_current_size", 0)),
    }


def cpu_us_per_step(before: Reading, after: Reading, steps: int) -> dict[str, float]:
    """Microseconds of CPU by group."""
    return {name: (after.cpu_s[name] - before.cpu_s[name]) / steps * 1e6 for name in after.cpu_s}


def other_cores(before: Reading, after: Reading) -> float:
    """How many cores other processes used. Results with much of it cannot be compared."""
    measured_s = sum(after.cpu_s.values()) - sum(before.cpu_s.values())
    busy_s = after.machine_busy_s - before.machine_busy_s
    return max(0.0, (busy_s - measured_s) / (after.at_s - before.at_s))


def redis_cost(before: Reading, after: Reading, steps: int) -> RedisCost | None:
    """What the steps cost in Redis; None without Redis."""
    if not after.redis:
        return None
    change = {name: (value - before.redis.get(name, 0.0)) / steps for name, value in after.redis.items()}
    calls = {name.removeprefix("calls:"): value for name, value in change.items() if name.startswith("calls:")}
    ordered = dict(sorted(((k, round(v, 3)) for k, v in calls.items() if v >= 0.001), key=lambda item: -item[1]))
    return RedisCost(
        commands=sum(calls.values()),
        scripts=calls.get("fcall", 0.0),
        bytes_in=change["bytes_in"],
        bytes_out=change["bytes_out"],
        file_bytes=change["file_bytes"],
        by_command=ordered,
    )
