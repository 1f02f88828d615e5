"""The model repository as the protocols see it: the executors' indexes merged, and load and unload for all of them.

A load is a message to every executor (`keyspace.control`) and is finished when every living one has carried it out. An
executor that dies meanwhile is not waited for; one that joins meanwhile reads the message when it starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis

from gateway.catalog import Catalog
from shared.errors import Code, LoadError, MeshError, RequestError, UnavailableError
from shared.keyspace import Keyspace
from shared.limits import CONTROL_STREAM_ENTRIES
from shared.membership import Member
from shared.messages import ControlMessage, RepositoryEntry, encode
from shared.redis_client import CONNECTION_LOST

CONTROL_TIMEOUT_S = 300.0
"""Loading a large model takes minutes; a longer wait means that an executor hangs."""
CONTROL_POLL_S = 0.1
EXPLICIT = "explicit"


class Repository:
    """Index, load and unload, for both protocols."""

    def __init__(self, redis: Redis, keys: Keyspace, catalog: Catalog) -> None:
        # redis-py types its shared sync/async commands as unions; here they are always awaitable.
        self._redis = cast("Any", redis)
        self._keys = keys
        self._catalog = catalog

    def index(self, *, ready_only: bool = False) -> list[RepositoryEntry]:
        """Every model version that an executor knows of, by name and version."""
        lines = self._catalog.picture.repository
        return [line for line in lines if line.state == "READY"] if ready_only else list(lines)

    async def load(self, model: str, *, config_json: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Loads (or reloads) a model on every executor; returns when it is READY.

        config_json  replaces the repository's configuration
        files        path below the model's directory -> content, instead of the repository's; needs `config_json`
        raises       RequestError for a wrong name, UnavailableError when models are not loaded on request,
                     LoadError with the executors' reason
        """
        check_model_name(model)
        if files and not config_json:
            raise RequestError(
                f"failed to load '{model}', override files were provided, but the model config was not: a 'config' "
                "parameter must come with them"
            )
        await self._carry_out(ControlMessage("load", model, config_json, dict(files or {})))
        lines = [line for line in self.index() if line.model == model]
        if any(line.state == "READY" for line in lines):
            return
        reasons = "; ".join(dict.fromkeys(line.reason for line in lines if line.reason))
        if not lines:
            reasons = "failed to poll from model repository"
        raise LoadError(f"failed to load '{model}', {reasons or 'no version is available'}", Code.INVALID_ARG)

    async def unload(self, model: str) -> None:
        """Unloads a model from every executor. One that is not loaded is no error, as in Triton."""
        check_model_name(model)
        await self._carry_out(ControlMessage("unload", model))
        left = [line.version for line in self.index() if line.model == model and line.state in ("READY", "UNLOADING")]
        if left:
            raise MeshError(
                f"failed to unload '{model}', versions that are still available: {', '.join(left)}", Code.INTERNAL
            )

    async def _carry_out(self, message: ControlMessage) -> None:
        try:
            await self._catalog.refresh()
            await self._check_mode()
            entry = await self._redis.xadd(
                self._keys.control, {"m": encode(message)}, maxlen=CONTROL_STREAM_ENTRIES, approximate=True
            )
            await self._applied(entry.decode(), message)
        except CONNECTION_LOST as lost:
            raise UnavailableError(
                f"Redis cannot be reached: {lost}; whether '{message.model}' changed is unknown"
            ) from lost

    async def _check_mode(self) -> None:
        members = self._catalog.live_members()
        if not members:
            raise UnavailableError("no executor is running that could load or unload a model")
        if any(member.registration.control_mode != EXPLICIT for member in members):
            raise UnavailableError("explicit model load / unload is not allowed if polling is enabled")

    async def _applied(self, entry: str, message: ControlMessage) -> None:
        """Returns when every living executor has carried the message out."""
        deadline = time.monotonic() + CONTROL_TIMEOUT_S
        while True:
            await self._catalog.refresh()
            late = behind(self._catalog.live_members(), entry)
            if not late:
                return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"'{message.action}' of '{message.model}' was not carried out within {CONTROL_TIMEOUT_S:.0f} s by "
                    f"{', '.join(late)}; it will be when they get to it"
                )
            await asyncio.sleep(CONTROL_POLL_S)


def check_model_name(model: str) -> None:
    """Refuses names that could mean a place outside the repository."""
    if not model:
        raise RequestError("Model name cannot be empty. Please enter a valid name to deploy.")
    if "/" in model or "\\" in model or model in (".", ".."):
        raise RequestError(f"invalid model name '{model}', model name must not contain path traversal characters")


def behind(members: Sequence[Member], entry: str) -> list[str]:
    """Names of the executors that have not carried out the control message yet."""
    return [
        member.registration.name
        for member in members
        if not member.registration.leaving and entry_key(member.registration.applied) < entry_key(entry)
    ]


def entry_key(entry: str) -> tuple[int, int]:
    """A stream entry's id in the order of the stream."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)
