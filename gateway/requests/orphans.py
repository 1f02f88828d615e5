"""Orphans: sequences whose connection is gone before their END (model parameter `orphan_grace_microseconds`).

A connection here is a gRPC stream, or one unary call or HTTP request that has no answer yet. It is gone when it breaks,
when the client cancels it, and also when the client closes a stream in order. The sequences of a lost connection may go
on over any other one; but if the client is dead, nobody will end them, so they get a shorter idle time. A gateway that
stops closes its connections itself, and its clients go on through another gateway: this makes no orphans.

A connection remembers, for each of its open sequences, the latest step that the mesh accepted over it. The script
`orphan.lua` compares: if another connection has used the sequence since, the sequence is no orphan. Redis is told of an
orphan only after it has accepted that step, so no order with `gateway.requests.exchange.dispatch` is needed. If the
message is late or never sent, the sequence has its whole idle time, as without the parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from gateway.requests.waiting import PendingRequest
from shared.contract.ids import SequenceId
from shared.contract.messages import END
from shared.store.script_values import Orphan

NOTED_MAX = 16_384
"""Open sequences that one connection remembers, about 200 bytes each. Beyond it the least recently used is dropped."""


class ConnectionSequences:
    """The open sequences of one connection. orphaned: called with each of them when the connection is gone."""

    def __init__(self, orphaned: Callable[[Orphan], None]) -> None:
        self._orphaned = orphaned
        # Not a plain dict: to find its oldest key takes the longer, the more keys were removed before it.
        self._open: OrderedDict[SequenceId, Orphan] = OrderedDict()
        self._gone = False

    def used(self, pending: PendingRequest) -> None:
        """The mesh has accepted this step of a sequence, or knew it."""
        sequence, grace_ms = pending.admitted.sequence, pending.record.config.orphan_grace_ms
        assert sequence is not None, "only steps of sequences have a user"
        # Removed and put in again below: thereby ordered by last use.
        self._open.pop(sequence, None)
        if pending.admitted.flags & END:
            return
        orphan = Orphan(sequence, pending.token, grace_ms)
        if self._gone:
            self._orphaned(orphan)
            return
        self._open[sequence] = orphan
        if len(self._open) > NOTED_MAX:
            self._open.popitem(last=False)

    def end(self) -> None:
        """The connection is gone: its sequences are orphans. So is each whose step is accepted only after this."""
        self._gone = True
        for orphan in self._open.values():
            self._orphaned(orphan)
        self._open.clear()
