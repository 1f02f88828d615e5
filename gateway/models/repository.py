"""The model repository as the protocols see it: the executors' indexes merged, and load and unload on all executors.

To load or unload a model, the gateway writes a `ControlMessage` to Redis (the hash `keyspace.wanted`, one field per
model) and tells every executor about it through the control stream. The call ends when every living executor has
carried the message out, or has failed. An executor that dies meanwhile is not waited for. An executor that joins
meanwhile finds the message when it starts (`executor.lease.control`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from redis.exceptions import ResponseError

from gateway.bounds.byte_budget import ByteBudget
from gateway.models.catalog import Catalog
from gateway.models.ensembles import models_below
from gateway.models.shared_reads import SharedReads
from shared.contract.errors import Code, LoadError, MeshError, RequestError, UnavailableError, code_of
from shared.contract.ids import entry_key
from shared.contract.limits import (
    CONTROL_BYTES_MAX,
    CONTROL_FILES_MAX,
    CONTROL_MESSAGE_BYTES_MAX,
    CONTROL_STREAM_ENTRIES,
)
from shared.contract.messages import ControlMessage, LoadFailure, RepositoryEntry, encode
from shared.store.commands import Redis
from shared.store.connections.redis_py import CONNECTION_LOST, LOST_OR_REFUSED
from shared.store.keyspace import Keyspace
from shared.store.membership import Member, lines_of

CONTROL_TIMEOUT_S = 300.0
"""Loading a large model takes minutes. A longer wait means that an executor hangs."""
CONTROL_POLL_S = 0.1
EXPLICIT = "explicit"
STORED_BYTES = """#!lua flags=no-writes
local bytes = -redis.call('HSTRLEN', KEYS[1], ARGV[1])
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
    bytes = bytes + redis.call('HSTRLEN', KEYS[1], name)
end
return { bytes }
"""
"""What the values of a hash take, but for that of one field. There is one for each name that was ever loaded."""
REMOVED_IF_IT_IS = """#!lua flags=allow-oom
return redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] and redis.call('HDEL', KEYS[1], ARGV[1]) or 0
"""
"""Removes a field of a hash that has this value."""
COPIES_AT_ONCE = 2
"""How often what a client brings lies in memory until it is loaded: as it came, and as it goes to the executors."""


class RepositoryControl:
    """Index, load and unload, for both protocols."""

    def __init__(
        self, redis: Redis, keys: Keyspace, catalog: Catalog, budget: ByteBudget, *, takes_overrides: bool = True
    ) -> None:
        """What clients bring is counted in the budget until it is loaded.

        takes_overrides  clients may send configurations and files, that is, code of their own
        """
        self._redis = redis
        self._keys = keys
        self._catalog = catalog
        self._budget = budget
        self._takes_overrides = takes_overrides
        # Many loads may wait at once, and each looks ten times a second.
        self._views = SharedReads[None, None](lambda _: catalog.refresh())

    def without_overrides(self) -> RepositoryControl:
        """The same control for clients that may load only what lies in the repository."""
        return RepositoryControl(self._redis, self._keys, self._catalog, self._budget, takes_overrides=False)

    def index(self, *, ready_only: bool = False) -> list[RepositoryEntry]:
        """Every model version that an executor knows of, by name and version."""
        lines = self._catalog.view.repository
        return [line for line in lines if line.state == "READY"] if ready_only else list(lines)

    async def load(
        self, model: str, *, config_json: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Loads (or reloads) a model on every executor; returns when it is READY.

        config_json  replaces the repository's configuration; None: nothing does
        files        path below the model's directory -> content, replaces the repository's files; needs `config_json`
        raises       RequestError for a wrong name, an empty configuration, or overrides that this gateway does not
                     take; UnavailableError when models are not loaded on request, or the gateway has no room for
                     the files; LoadError with an executor's reason: the executors then still serve what they served
                     before
        """
        await self._check_mode()
        check_model_name(model)
        if (config_json is not None or files) and not self._takes_overrides:
            raise RequestError(
                f"failed to load '{model}', a configuration or files may not be brought to a gateway that listens "
                "beyond loopback: restrict 'model-repository' (--restricted-api), or give it --allow-load-overrides",
                Code.FORBIDDEN,
            )
        check_overrides(model, files or {}, config_json)
        brought = len(config_json or "") + sum(map(len, (files or {}).values()))
        with self._budget.reserve() as reservation:
            reservation.hold(COPIES_AT_ONCE * brought)
            await self._load(model, config_json or "", files or {})
        failure = await self._load_steps(model)
        lines = [line for line in self.index() if line.model == model]
        if not any(line.state == "READY" for line in lines):
            # What failed of an ensemble's steps, its own reason tells.
            reason = next((line.reason for line in lines if self._steps(model)), "")
            if reason:
                raise LoadError(f"load failed for model '{model}': {reason}\n")
            raise LoadError(f"failed to load '{model}', no version is available", Code.INTERNAL)
        if failure is not None:
            raise failure

    async def _load_steps(self, model: str) -> LoadError | None:
        """Loads the models of an ensemble's steps, unless they are loaded already, as in Triton. All of them are tried;
        returns the first error.
        """
        first: LoadError | None = None
        tried = {model}
        while missing := self._steps(model) - self._loaded() - tried:
            tried |= missing
            for step in sorted(missing):
                try:
                    await self._load(step, "", {})
                except LoadError as error:
                    first = first or error
        return first

    def _steps(self, model: str) -> set[str]:
        return models_below(model, self._catalog.view.records)

    def _loaded(self) -> set[str]:
        """What executors have loaded; an ensemble also while a model of its steps is missing."""
        lines = lines_of(one.registration.repository for one in self._catalog.live_members())
        return {line.model for line in lines if line.state == "READY"}

    async def _load(self, model: str, config_json: str, files: Mapping[str, bytes]) -> None:
        word = ControlMessage("load", model, config_json, dict(files), uuid.uuid4().hex)
        members, entry = await self._carry_out(word)
        failure = decisive_failure(members, entry, word.generation)
        if failure is not None:
            await self._withdraw(word)
            raise LoadError(failure.error, code_of(failure.code))

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        """Takes a model out of service on every executor. Requests that were accepted are finished.

        dependents  of an ensemble: the models of its steps too (`unload_dependents`), as far as no other ensemble that
                    is loaded has them in its steps

        Unloading a model that is not loaded is no error, as in Triton.
        """
        await self._check_mode()
        check_model_name(model)
        steps = self._steps(model) if dependents else set[str]()
        others = self._loaded() - steps - {model}
        kept = set[str]().union(*map(self._steps, others)) if steps else steps
        for name in (model, *sorted(steps - kept)):
            await self._unload(name)

    async def _unload(self, model: str) -> None:
        word = ControlMessage("unload", model)
        try:
            known: bool = await self._redis.hexists(self._keys.wanted, model)
        except LOST_OR_REFUSED as lost:
            raise UnavailableError(f"Redis cannot be read: {lost}; '{model}' did not change") from lost
        if not known and all(line.model != model or not line.state for line in self.index()):
            return
        await self._carry_out(word)
        left = [line.version for line in self.index() if line.model == model and line.state == "READY"]
        if left:
            raise MeshError(
                f"failed to unload '{model}', versions that are still available: {','.join(left)}", Code.INTERNAL
            )

    async def _carry_out(self, word: ControlMessage) -> tuple[Sequence[Member], str]:
        """Sends the message to every executor and waits until they have applied it.

        returns  the executors that have applied it, and the id of the message's entry in the control stream
        """
        encoded = encode(word)
        if len(encoded) > CONTROL_MESSAGE_BYTES_MAX:
            raise RequestError(
                f"failed to load '{word.model}', configuration and files of {len(encoded)} bytes exceed the mesh's "
                f"limit of {CONTROL_MESSAGE_BYTES_MAX} bytes"
            )
        try:
            await self._check_size(word.model, len(encoded))
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(self._keys.wanted, word.model, encoded)
                pipe.xadd(self._keys.control, {"n": word.model}, maxlen=CONTROL_STREAM_ENTRIES, approximate=True)
                _, entry = await pipe.execute()
            return await self._applied(entry.decode(), word), entry.decode()
        except ResponseError as refused:
            raise UnavailableError(f"Redis refused the change of '{word.model}': {refused}") from refused
        except CONNECTION_LOST as lost:
            raise UnavailableError(
                f"Redis cannot be reached: {lost}; whether '{word.model}' changed is unknown"
            ) from lost

    async def _check_mode(self) -> None:
        """Raises UnavailableError if an executor does not load on request. The first of all checks, as in Triton."""
        try:
            await self._views.get(None)
        except LOST_OR_REFUSED as lost:
            raise UnavailableError(f"Redis cannot be read: {lost}; nothing was changed") from lost
        members = self._catalog.live_members()
        if not members:
            raise UnavailableError("no executor is running that could load or unload a model")
        if any(member.registration.control_mode != EXPLICIT for member in members):
            raise UnavailableError(
                "explicit model load / unload is not allowed if polling is enabled: start every executor with "
                "--model-control-mode explicit"
            )

    async def _check_size(self, model: str, size: int) -> None:
        (stored,) = await self._redis.eval(STORED_BYTES, 1, self._keys.wanted, model)
        if stored + size > CONTROL_BYTES_MAX:
            raise UnavailableError(
                f"failed to load '{model}', the mesh holds {stored} bytes of override files already, and its limit is "
                f"{CONTROL_BYTES_MAX}: load other models without files, or put the files into the repository"
            )

    async def _withdraw(self, word: ControlMessage) -> None:
        """Removes a message that could not be carried out, so that executors that start later do not try it again.
        Another message about the model, which was written since, stays.
        """
        # Without it, executors that start later try it too, and fail as the others have. What they serve is the same.
        with suppress(*LOST_OR_REFUSED):
            await self._redis.eval(REMOVED_IF_IT_IS, 1, self._keys.wanted, word.model, encode(word))

    async def _applied(self, entry: str, word: ControlMessage) -> Sequence[Member]:
        """Waits until every living executor has applied the message, and there is at least one. Returns them."""
        deadline = time.monotonic() + CONTROL_TIMEOUT_S
        while True:
            await self._views.get(None)
            members = [member for member in self._catalog.live_members() if member.usable]
            late = behind(members, entry)
            if members and not late:
                return members
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"'{word.action}' of '{word.model}' was not carried out within {CONTROL_TIMEOUT_S:.0f} s by "
                    f"{', '.join(late) or 'any executor'}; it will be when they get to it"
                )
            await asyncio.sleep(CONTROL_POLL_S)


def check_model_name(model: str) -> None:
    """Refuses names that could mean a place outside the repository."""
    if not model:
        raise RequestError("Model name cannot be empty. Please enter a valid name to deploy.")
    if any(character in model for character in "/\\\0") or model in (".", ".."):
        raise RequestError(f"invalid model name '{model}', model name must not contain path traversal characters")


def check_overrides(model: str, files: Mapping[str, bytes], config_json: str | None) -> None:
    """Refuses an empty configuration, files without one, too many, and those that would leave the model's directory."""
    if config_json == "":
        raise RequestError(f"failed to load '{model}', failed to parse model configuration JSON: 'config' is empty")
    if files and config_json is None:
        raise RequestError(
            f"failed to load '{model}', override files were provided, but the model config was not: a 'config' "
            "parameter must come with them"
        )
    if len(files) > CONTROL_FILES_MAX:
        raise RequestError(
            f"failed to load '{model}', {len(files)} override files exceed the mesh's limit of {CONTROL_FILES_MAX}: "
            "put them into the repository"
        )
    for name in files:
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise RequestError(f"failed to load '{model}', file '{name}' must not leave the model's directory")


def decisive_failure(members: Sequence[Member], entry: str, generation: str) -> LoadFailure | None:
    """Why a message failed: an executor's reason, or None if it did not fail.

    Executors need not all have the same models. So an executor that has no such model in its repository is no failure,
    unless none of them has it.

    entry       id of the message's entry in the control stream
    generation  the message's; an executor that has started since knows the message by it, not by the entry
    """
    ordered = sorted(members, key=lambda member: member.registration.name)
    failures = [
        each
        for member in ordered
        for each in member.registration.failures
        if each.entry == entry or (not each.entry and each.generation == generation)
    ]
    serious = [failure for failure in failures if failure.found]
    if serious:
        return serious[0]
    return failures[0] if failures and len(failures) >= len(members) else None


def behind(members: Sequence[Member], entry: str) -> list[str]:
    """Names of the executors that have not carried out the control message yet."""
    told = [member.registration for member in members]
    return [one.name for one in told if entry_key(one.applied) < entry_key(entry) and entry not in one.beyond]
