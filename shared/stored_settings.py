"""Settings that can be changed while the mesh runs, for all of its services: what is logged, and what is traced.

They are one hash in Redis, which every service reads a few times a second. Each setting is a field of its own, so that
two changes at once never undo each other, and a change that is sent twice is one change.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, get_type_hints

import msgspec

from shared.process import log_settings, logs
from shared.process.log_settings import LogSettings
from shared.store.commands import Redis
from shared.store.intervals import at_intervals
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of, value_of
from shared.traces import settings as trace_settings
from shared.traces.control import TraceControl

POLL_INTERVAL_S = 0.5
TAKEN_OFF = """#!lua flags=allow-oom
local left = tonumber(redis.call('HGET', KEYS[1], ARGV[1]))
return left and left > 0 and redis.call('HSET', KEYS[1], ARGV[1], math.max(0, left - ARGV[2])) or 0
"""
"""Takes so many off a count of a hash that is above 0."""


class ChangedSettings(msgspec.Struct, frozen=True):
    """The settings that were changed.

    logs    log settings by name
    traces  trace settings by model, "" for the whole mesh
    by      who changed `logs` and `traces` last, when and where
    """

    logs: dict[str, bool | int | str] = {}
    traces: dict[str, dict[str, tuple[str, ...] | int]] = {}
    by: dict[str, str] = {}


class StoredSettings:
    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        self._redis = redis
        self._key = keys.settings

    async def read(self) -> ChangedSettings:
        return changed_settings_of(await self._redis.hgetall(self._key), self._key)

    async def change_logs(self, changes: log_settings.Changes, by: str = "") -> None:
        """Sets log settings that were checked. Names that are no settings are ignored, as in Triton.

        by  who changes them, for the log of every process
        """
        known = {name: value for name, value in changes.items() if name in LogSettings.__struct_fields__}
        await self._write({f"log:{name}": value for name, value in known.items()} | said("logs", by))

    async def change_traces(
        self, model: str, changes: Mapping[str, tuple[str, ...] | int | None], by: str = ""
    ) -> None:
        """Sets a model's trace settings, or with model "" the mesh's. None takes a setting back.
        by: who changes them
        """
        await self._write({f"trace:{name}:{model}": value for name, value in changes.items()} | said("traces", by))

    async def reset(self, by: str) -> None:
        """Takes every change back, if there is any: each process uses the settings that it was started with."""
        if not await self._redis.exists(self._key):
            return
        authors = said("logs", by) | said("traces", by)
        async with self._redis.pipeline(transaction=True) as together:
            together.delete(self._key)
            together.hset(self._key, mapping={name: msgspec.json.encode(value) for name, value in authors.items()})
            await together.execute()

    async def count_traces(self, model: str, used: int) -> None:
        """Takes traced requests off a scope's `trace_count`, if it still has one.
        Never below 0, because -1 means all.
        """
        await self._redis.eval(TAKEN_OFF, 1, self._key, f"trace:trace_count:{model}", used)

    async def _write(self, fields: Mapping[str, object]) -> None:
        gone = [name for name, value in fields.items() if value is None]
        given = {name: msgspec.json.encode(value) for name, value in fields.items() if value is not None}
        async with self._redis.pipeline(transaction=True) as together:
            if gone:
                together.hdel(self._key, *gone)
            if given:
                together.hset(self._key, mapping=given)
            await together.execute()


def said(what: str, by: str) -> dict[str, object]:
    """The field that says who has changed something, and when. With the time, two changes by one user differ."""
    return {f"by:{what}": f"{by} at {datetime.now(UTC).isoformat(timespec='milliseconds')}"} if by else {}


_decoders: dict[str, dict[str, Callable[[bytes], Any]]] = {
    "log": {name: msgspec.json.Decoder(kind).decode for name, kind in get_type_hints(LogSettings).items()},
    "trace": {
        name: msgspec.json.Decoder(kind).decode
        for name, kind in get_type_hints(trace_settings.TraceSettings).items()
        if name in trace_settings.NAMES
    },
    "by": {name: msgspec.json.Decoder(str).decode for name in ("logs", "traces")},
}
"""The decoder of each setting, by the kind with which its field begins."""


def changed_settings_of(fields: Mapping[bytes, bytes], key: str) -> ChangedSettings:
    """Reads the hash. A field that is unknown here belongs to a newer release, and a field that cannot be read has its
    default: both are left out.
    """
    log_values: dict[str, Any] = {}
    traces: dict[str, dict[str, Any]] = {}
    by: dict[str, str] = {}
    for field, encoded in fields.items():
        kind, _, rest = (text := text_of(field)).partition(":")
        name, _, model = rest.partition(":")
        decode = _decoders.get(kind, {}).get(name)
        value: Any = None if decode is None else value_of(key, encoded, decode, field=text)
        if value is None:
            continue
        if kind == "by":
            by[name] = value
        else:
            (log_values if kind == "log" else traces.setdefault(model, {}))[name] = value
    return ChangedSettings(log_values, traces, by)


class ProcessSettings:
    """Applies the mesh's settings to the logging and tracing of one service process.

    level  the log level that the process was started with, which holds until a setting changes it
    """

    def __init__(self, settings: StoredSettings, control: TraceControl, level: logs.Level) -> None:
        self._settings = settings
        self._control = control
        self._logs = log_settings.of_level(level)
        self._seen = ChangedSettings()
        self._refreshing = asyncio.Lock()
        # Traced requests by scope that Redis has counted, while the settings which contain them were not read yet.
        self._counted: Counter[str] = Counter()

    async def run(self) -> None:
        """Applies the settings now and whenever they change, for ever."""
        await at_intervals(POLL_INTERVAL_S, self.refresh, "settings reading delayed", log=logs.debug, at_once=True)

    async def refresh(self) -> None:
        """Applies the settings as they are now. Raises what redis-py raises."""
        async with self._refreshing:
            for scope, requests in self._control.used().items():
                if new := requests - self._counted[scope]:
                    await self._settings.count_traces(scope, new)
                    self._counted[scope] = requests
            changed = await self._settings.read()
            # The settings that were read contain these requests, so they are not subtracted a second time.
            self._control.counted(self._counted)
            self._counted.clear()
            if changed != self._seen:
                before, self._seen = self._seen, changed
                self._control.apply(changed.traces)
                logs.choose(self.logs.levels())
                logs.debug("log settings", **msgspec.structs.asdict(self.logs))
                for what, by in changed.by.items():
                    now = changed.logs if what == "logs" else changed.traces
                    # Not of what was taken back before this process was started.
                    if by != before.by.get(what) and (now or before.by):
                        # A notice, because it is written even if logging was switched off: then the operator asks who
                        # did it.
                        logs.notice(
                            f"settings of {what} changed",
                            by=by,
                            now=now or "as started",
                            back="seqmesh settings --reset",
                        )

    @property
    def logs(self) -> LogSettings:
        """The log settings that hold here."""
        return msgspec.structs.replace(self._logs, **self._seen.logs)
