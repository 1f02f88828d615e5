"""Routes about the sequences of a model: a list, one of them, and its end. Triton has no such routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.models.catalog import Catalog
from gateway.rest.models import model_and_version
from gateway.rest.reply import send_json
from shared.contract.errors import Code, RequestError
from shared.contract.ids import SequenceId, correlation_id_from, sequence_id
from shared.store.scripts import EndCode
from shared.store.sequences import OPEN_STATES, SORT_KEYS, Sequences, Wanted

LIMIT, LIMIT_MAX = 100, 1000
"""Sequences in one answer: by default, and at most."""
LISTED_BY = frozenset(("state", "executor", "prefix", "sort", "limit", "offset"))
CLOSED_TO_OTHERS = (
    "the sequences of a model are shown, and ended, on loopback only, because their ids let a client go on with them: "
    "restrict the category 'sequences' on this gateway (--restricted-api 'sequences:<header>=<secret>')"
)


class SequenceRoutes:
    """The handlers. Each answers one route.

    is_open  False: every request is refused, because anybody can reach this gateway
    """

    def __init__(self, catalog: Catalog, sequences: Sequences, *, is_open: bool) -> None:
        self._catalog = catalog
        self._sequences = sequences
        self._is_open = is_open
        # A list of a model with many sequences takes memory and many round trips: one at a time.
        self._turn = asyncio.Lock()

    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../sequences: the open sequences of a model, or of one version.

        Query: `state` (names with commas), `executor`, `prefix` of the id, `sort` (`-` before it: the other way round),
        `limit`, `offset`.
        """
        model, version = self._served(scope)
        query = _query(scope, LISTED_BY)
        limit, offset = _count(query, "limit", LIMIT, LIMIT_MAX), _count(query, "offset", 0, 2**31)
        wanted = Wanted(
            states=frozenset(_known(query, "state", OPEN_STATES)),
            executor=query.get("executor", ""),
            version=version,
            prefix=query.get("prefix", ""),
            sort=query.get("sort", "id"),
        )
        _check(wanted.sort.removeprefix("-"), "sort", SORT_KEYS)
        async with self._turn:
            found = await self._sequences.matching(model, wanted)
        page = [msgspec.to_builtins(one) for one in found[offset : offset + limit]]
        await send_json(send, {"sequences": page, "total": len(found), "limit": limit, "offset": offset})

    async def show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET .../sequences/{id}: one sequence, also one that is over while its tombstone stays."""
        sequence = self._named(scope)
        (status,) = await self._sequences.statuses([sequence])
        if status is None:
            raise _unknown(scope)
        sizes = await self._sequences.state_bytes(sequence)
        await send_json(send, {**msgspec.to_builtins(status), "state_bytes": sizes})

    async def end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE .../sequences/{id}: ends a sequence. Its open steps are answered; safe to repeat while it ends."""
        code = await self._sequences.end(self._named(scope))
        if code is EndCode.NOTHING:
            raise _unknown(scope)
        is_over = code is EndCode.REMOVED
        await send_json(send, {"state": "cancelled" if is_over else "closed"}, 200 if is_over else 202)

    def _served(self, scope: Scope) -> tuple[str, str]:
        """The model and the version of the path. Raises RequestError if they are not served, or not to everybody."""
        if not self._is_open:
            raise RequestError(CLOSED_TO_OTHERS, Code.FORBIDDEN)
        model, version = model_and_version(scope)
        self._catalog.record(model, version)
        return model, version

    def _named(self, scope: Scope) -> SequenceId:
        """The sequence of the path. An id of digits is a number, unless the query says `type=string`."""
        model, version = self._served(scope)
        query, text = _query(scope, {"type"}), scope["path_params"]["id"]
        if query.get("type", "string") != "string":
            raise RequestError("the query parameter 'type' must be 'string', or be left out")
        return sequence_id(model, version, correlation_id_from(text, string="type" in query))


def _unknown(scope: Scope) -> RequestError:
    model, version = model_and_version(scope)
    of = f"version {version} of model '{model}'" if version else f"model '{model}'"
    return RequestError(f"{of} has no open sequence '{scope['path_params']['id']}'", Code.NOT_FOUND)


def _query(scope: Scope, known: frozenset[str] | set[str]) -> dict[str, str]:
    """The parameters behind the path's question mark. Raises RequestError for one that is not known."""
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for name, _ in pairs:
        _check(name, "query parameter", dict.fromkeys(sorted(known)))
    return dict(pairs)


def _known(query: Mapping[str, str], name: str, words: tuple[str, ...]) -> list[str]:
    """The words of a parameter, which are separated by commas."""
    given = [word for word in query.get(name, "").split(",") if word]
    for word in given:
        _check(word, name, dict.fromkeys(words))
    return given


def _check(word: str, what: str, known: Mapping[str, Callable[..., Any] | None]) -> None:
    if word not in known:
        raise RequestError(f"unknown {what} '{word}': use one of {', '.join(known)}")


def _count(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(most)) or int(text) > most:
        raise RequestError(f"'{name}' must be a number from 0 to {most}")
    return int(text)
