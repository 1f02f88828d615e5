"""Routes about the sequences of a model: a list, and of one of them its status, pause, move, copies and end. Triton has
no such routes. The work is done by `shared.store.sequences`, as it is for `seqmesh seq`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import wraps
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.bounds.fair_lock import FairLock
from gateway.models.catalog import Catalog
from gateway.models.versions import check_version_text
from gateway.rest.body import BodyBounds, client_in, read_body, read_headers
from gateway.rest.models import model_and_version
from gateway.rest.operations import (
    ANY_OBJECT,
    BINARY_TYPE,
    BYTES,
    COUNT,
    JSON_TYPE,
    OF_BODY,
    OF_MODEL,
    Schema,
    array,
    described,
    json_content,
    members,
    of_struct,
    one_of,
)
from gateway.rest.reply import BINARY, send_bytes, send_json
from shared.contract.errors import Code, NotDoneError, RequestError
from shared.contract.ids import CorrelationId, SequenceId, correlation_id_from, sequence_id
from shared.contract.limits import PAUSE_MS_MAX
from shared.store.connections.redis_client import redis_needed
from shared.store.exported import from_file, to_file
from shared.store.script_values import EndCode
from shared.store.sequence_status import OPEN_STATES, SORT_KEYS, SequenceStatus, Wanted
from shared.store.sequences import Sequences, kept_by

PAUSE_S, PAUSE_S_MAX = 3600, PAUSE_MS_MAX // 1000
"""How long a pause lasts: by default, and at most."""
LIMIT, LIMIT_MAX, OFFSET_MAX = 100, 1000, 2**31
"""Sequences in one answer: by default, and at most; and those before them."""
LIST_QUERY: Mapping[str, Schema] = {
    "state": {"type": "string", "description": f"States, separated by commas: {', '.join(OPEN_STATES)}."},
    "executor": {"type": "string", "description": "Name or id of the owner."},
    "tenant": {"type": "string", "description": "Whose they are."},
    "prefix": {"type": "string", "description": "How the id begins, as text."},
    "sort": {"type": "string", "description": f"One of {', '.join(SORT_KEYS)}; behind `-` the other way round."},
    "limit": {"type": "integer", "minimum": 0, "maximum": LIMIT_MAX, "default": LIMIT},
    "offset": {"type": "integer", "minimum": 0, "maximum": OFFSET_MAX, "default": 0},
}
"""What a list can be asked for."""
ID_QUERY: Mapping[str, Schema] = {
    "type": {"type": "string", "enum": ["string"], "description": "The id is a text, though it looks like a number."}
}
ACTIONS = ("pause", "resume", "move", "fork", "export")
ACTION_QUERY: Mapping[str, Schema] = {
    **ID_QUERY,
    "action": {"type": "string", "enum": list(ACTIONS), "description": "What is to be done."},
    "seconds": {
        "type": "integer",
        "minimum": 1,
        "maximum": PAUSE_S_MAX,
        "default": PAUSE_S,
        "description": "How long a pause lasts at most.",
    },
    "to": {"type": "string", "description": "Of a move: name or id of the executor; without it any other one."},
    "as": {"type": "string", "description": "Of a fork: the id of the copy, of the same type."},
}
"""The action is no part of the path, because an id may have slashes."""
IMPORT_QUERY: Mapping[str, Schema] = {
    "as": {"type": "string", "description": "The id of the opened sequence; without it that of the exported one."},
    **ID_QUERY,
}
COPIES_AT_ONCE = 3
"""How often the bytes of an exported sequence lie in memory while its file is made or read."""
SEQUENCES_PAGE = members(
    "sequences total limit offset", sequences=array(of_struct(SequenceStatus)), total=COUNT, limit=COUNT, offset=COUNT
)
ENDED = members("state", state=one_of(("cancelled", "closed")))
CLOSED_TO_OTHERS = (
    "the sequences of a model are shown, and ended, on loopback only, because their ids let a client go on with them: "
    "restrict the category 'sequences' on this gateway (--restricted-api 'sequences:<header>=<secret>')"
)


Handler = Callable[["SequenceRoutes", Scope, Receive, Send], Coroutine[Any, Any, None]]


def _of_redis(handler: Handler) -> Handler:
    """A handler whose client hears that Redis is away, or refuses: nothing is wrong with the gateway then."""

    @wraps(handler)
    async def answers(self: SequenceRoutes, scope: Scope, receive: Receive, send: Send) -> None:
        with redis_needed("sequences", "reached or refuses"):
            await handler(self, scope, receive, send)

    return answers


class SequenceRoutes:
    """The handlers. Each answers one route.

    bounds   of files that are sent, and of the memory for those that are asked for
    is_open  False: every request is refused, because anybody can reach this gateway
    """

    def __init__(self, catalog: Catalog, sequences: Sequences, bounds: BodyBounds, *, is_open: bool) -> None:
        self._catalog = catalog
        self._sequences = sequences
        self._bounds = bounds
        self._is_open = is_open
        # A list of a model with many sequences, or a large state, takes memory and many round trips: one at a time.
        self._turn = FairLock()

    @described(SEQUENCES_PAGE, errors=OF_MODEL, query=LIST_QUERY)
    @_of_redis
    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../sequences: the open sequences of a model, or of one version."""
        model, version = self._served(scope)
        query = _query(scope, LIST_QUERY)
        limit, offset = _count(query, "limit", LIMIT, LIMIT_MAX), _count(query, "offset", 0, OFFSET_MAX)
        wanted = Wanted(
            states=frozenset(_known(query, "state", OPEN_STATES)),
            executor=query.get("executor", ""),
            version=version,
            tenant=query.get("tenant", ""),
            prefix=query.get("prefix", ""),
            sort=query.get("sort", "id"),
        )
        _check(wanted.sort.removeprefix("-"), "sort", SORT_KEYS)
        async with self._turn.held(client_in(scope)):
            found, total = await self._sequences.page(model, wanted, offset, offset + limit)
            shown = await self._sequences.foretold(found)
        page = [msgspec.to_builtins(one) for one in shown]
        await send_json(send, {"sequences": page, "total": total, "limit": limit, "offset": offset})

    @described(
        of_struct(SequenceStatus, state_bytes=ANY_OBJECT, model_state_bytes=COUNT), errors=OF_MODEL, query=ID_QUERY
    )
    @_of_redis
    async def show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../sequences/{id}: one sequence, also one that is over while its tombstone stays."""
        sequence = self._named(scope)
        (status,) = await self._sequences.statuses([sequence])
        if status is None:
            raise _unknown(scope)
        (status,) = await self._sequences.foretold([status])
        sizes = await self._sequences.state_sizes(sequence)
        await send_json(send, msgspec.to_builtins(status) | msgspec.to_builtins(sizes))

    @described((200, json_content(ENDED)), (202, json_content(ENDED)), errors=OF_MODEL, query=ID_QUERY)
    @_of_redis
    async def end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE .../sequences/{id}: ends a sequence. Its open steps are answered; safe to repeat while it ends."""
        code = await self._sequences.end(self._named(scope))
        if code is EndCode.NOTHING:
            raise _unknown(scope)
        is_over = code is EndCode.REMOVED
        await send_json(send, {"state": "cancelled" if is_over else "closed"}, 200 if is_over else 202)

    @described((200, {JSON_TYPE: of_struct(SequenceStatus), BINARY_TYPE: BYTES}), errors=OF_MODEL, query=ACTION_QUERY)
    @_of_redis
    async def act(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../sequences/{id}: pauses a sequence, resumes, moves, forks or exports it, as `action` says.

        The answer is the status of the sequence, of a fork that of the copy, and of an export the file.
        """
        sequence = self._named(scope, ACTION_QUERY)
        query = _query(scope, ACTION_QUERY)
        _check(query.get("action", ""), "action", ACTIONS)
        seconds = _count(query, "seconds", PAUSE_S, PAUSE_S_MAX, least=1)
        try:
            match query["action"]:
                case "pause":
                    status = await self._sequences.pause(sequence, 1000 * seconds)
                case "resume":
                    status = await self._sequences.resume(sequence)
                case "move":
                    await self._sequences.move(sequence, query.get("to", ""))
                    status = await self._shown(sequence)
                case "fork":
                    copy = self._other(scope, query)
                    async with self._turn.held(client_in(scope)):
                        await self._sequences.fork(sequence, copy)
                    status = await self._shown(copy)
                case _:
                    await self._export(scope, send, sequence)
                    return
        except NotDoneError as error:
            raise RequestError(f"'{scope['path_params']['id']}': {error}", error.code) from error
        await send_json(send, msgspec.to_builtins(status))

    async def _export(self, scope: Scope, send: Send, sequence: SequenceId) -> None:
        """One at a time, and within the budget of requests: a state may be large. The turn ends before the client
        reads: it may be slow."""
        with self._bounds.budget.reserve(client_in(scope)) as reservation:
            async with self._turn.held(client_in(scope)):
                reservation.hold(COPIES_AT_ONCE * await self._sequences.export_bytes(sequence))
                exported = await self._sequences.export_when_idle(sequence)
                data = await asyncio.to_thread(to_file, exported)
                del exported
            await send_bytes(send, 200, data, (BINARY,))

    @described(of_struct(SequenceStatus), errors=(*OF_BODY, *OF_MODEL), query=IMPORT_QUERY, body={BINARY_TYPE: BYTES})
    @_of_redis
    async def open_exported(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST .../sequences: opens an exported sequence of the model. It goes on with its next step."""
        model, version = self._served(scope)
        query = _query(scope, IMPORT_QUERY)
        with self._bounds.budget.reserve(client_in(scope)) as reservation:
            data = await read_body(receive, read_headers(scope), self._bounds.size_max, reservation)
            async with self._turn.held(client_in(scope)):
                reservation.hold(COPIES_AT_ONCE * len(data))
                try:
                    exported = await asyncio.to_thread(from_file, data)
                    if exported.model != model:
                        raise NotDoneError(f"it is a sequence of model '{exported.model}', not of '{model}'")
                    name = _id(query, query["as"]) if query.get("as") else exported.id
                    sequence = sequence_id(model, version, name)
                    await self._sequences.reopen(sequence, exported)
                except NotDoneError as error:
                    raise RequestError(f"the exported sequence is not opened: {error}", error.code) from error
        await send_json(send, msgspec.to_builtins(await self._shown(sequence)))

    async def _shown(self, sequence: SequenceId) -> SequenceStatus:
        (status,) = await self._sequences.statuses([sequence])
        if status is None:
            raise RequestError("the sequence is over meanwhile, and forgotten", Code.NOT_FOUND)
        return status

    def _other(self, scope: Scope, query: Mapping[str, str]) -> SequenceId:
        if not query.get("as"):
            raise RequestError("'as' must be the id of the copy")
        return sequence_id(*self._served(scope), _id(query, query["as"]))

    def _served(self, scope: Scope) -> tuple[str, str]:
        """The model of the path and its version in the plain form that names sequences. Raises RequestError if they are
        not served, or not to everybody, and for an ensemble.
        """
        if not self._is_open:
            raise RequestError(CLOSED_TO_OTHERS, Code.FORBIDDEN)
        model, version = model_and_version(scope)
        record, _ = self._catalog.record(model, version)
        if keepers := kept_by(record.config):
            raise RequestError(keepers)
        return model, check_version_text(version)

    def _named(self, scope: Scope, known: Collection[str] = ID_QUERY) -> SequenceId:
        """The sequence of the path. An id of digits is a number, unless the query says `type=string`."""
        model, version = self._served(scope)
        return sequence_id(model, version, _id(_query(scope, known), scope["path_params"]["id"]))


def _id(query: Mapping[str, str], text: str) -> CorrelationId:
    if query.get("type", "string") != "string":
        raise RequestError("the query parameter 'type' must be 'string', or be left out")
    return correlation_id_from(text, string="type" in query)


def _unknown(scope: Scope) -> RequestError:
    model, version = model_and_version(scope)
    of = f"version {version} of model '{model}'" if version else f"model '{model}'"
    return RequestError(f"{of} has no open sequence '{scope['path_params']['id']}'", Code.NOT_FOUND)


def _query(scope: Scope, known: Collection[str]) -> dict[str, str]:
    """The parameters behind the path's question mark. Raises RequestError for one that is not known."""
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for name, _ in pairs:
        _check(name, "query parameter", sorted(known))
    return dict(pairs)


def _known(query: Mapping[str, str], name: str, words: tuple[str, ...]) -> list[str]:
    """The words of a parameter, which are separated by commas."""
    given = [word for word in query.get(name, "").split(",") if word]
    for word in given:
        _check(word, name, words)
    return given


def _check(word: str, what: str, known: Collection[str]) -> None:
    if word not in known:
        raise RequestError(f"unknown {what} '{word}': use one of {', '.join(known)}")


def _count(query: Mapping[str, str], name: str, default: int, most: int, *, least: int = 0) -> int:
    text = query.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(most)) or not least <= int(text) <= most:
        raise RequestError(f"'{name}' must be a number from {least} to {most}")
    return int(text)
