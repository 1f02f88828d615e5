"""Who waits for the answer to a request."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.requests.orphans import ConnectionSequences
from gateway.requests.waiting import Answer, OnOpen


class Caller(msgspec.Struct, frozen=True):
    """Who waits for the answer to a request.

    future      gets the answer, the last one of several, or a MeshError. It is cancelled when the client leaves
    connection  that the request came over; None for one that carries only this request
    on_open     called before the request is sent, if its model is decoupled: it sets `OpenRequest.take`, which then
                takes every answer but the last one. None: a request to such a model is refused. It is also called for
                a request that asks about its wait (`OpenRequest.hear`)
    since       when the request came; seconds, monotonic clock. 0: the gateway's own time for it begins when it is sent
    client      whose request it is (`gateway.ports.seats.client_of`): the clients take turns
    """

    future: asyncio.Future[Answer]
    connection: ConnectionSequences | None
    on_open: OnOpen | None
    since: float = 0.0
    client: str = ""
