"""What a call between models carries beside its request: its name, and who waits for its answer. Pure.

A model that calls another one waits for the answer. The *chain* of a call lists those who wait, the first caller first:
by model, and for the step of a sequence also by that sequence. By its chain a call is refused that could never be
answered, and depth is bounded. An executor sends both to a gateway in the metadata of the RPC, and the gateway passes
them on in the message (`InferMessage.call`, `chain`, `deadline_ms`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

import msgspec
import xxhash

from shared.contract.errors import RequestError
from shared.contract.ids import SequenceId

CALL_KEY = "seqmesh-call"
"""Key of the metadata."""
ANSWERED_KEY = "seqmesh-answered"
"""Key of an error's trailing metadata, and of a parameter where a message of a stream refuses: the error is the mesh's
answer to the call, whichever gateway is asked.
"""
ACCEPTED, REFUSED = "accepted", "refused"
"""Its values: what became of the call."""
FULL = "Concurrent RPC limit exceeded!"
"""What a gateway, as any server of gRPC, says of a call for which it has no room now, with RESOURCE_EXHAUSTED."""
CALL_DEPTH_MAX = 16
"""Models that may wait for each other in a row. Their names are sent in a header, which has 8 KiB."""
VALUE_CHARS_MAX = 7168
"""Length of the metadata's value."""


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Where a call comes from.

    name         of the call: the same when the step of its model runs again; "" if nobody could tell it again
    chain        who waits for its answer, the first caller first (`waiting`)
    deadline_ms  wall clock at the gateway, ms, after which nobody waits for it; 0: none
    """

    name: str
    chain: tuple[str, ...] = ()
    deadline_ms: int = 0

    def within(self, part: str) -> CallOrigin:
        """The origin of one step of the ensemble that is called."""
        return replace(self, name=f"{self.name}/{part}") if self.name else self

    def is_named(self, name: str) -> bool:
        """Whether this is the call's name, or that of the call to the ensemble around it."""
        return self.name.partition("/")[0] == name


class WaitingCall(msgspec.Struct, frozen=True, order=True):
    """A call that an instance has waited for for a while, as its process tells all executors.

    since_ms  wall clock of the process
    process   that the instance runs in (`shared.store.waiting_calls`); with `number` it names the call
    caller, target  versions of models (`version_name`)
    """

    since_ms: int
    process: str
    number: int
    caller: str
    instance: str
    target: str


class WaitingCalls(msgspec.Struct, frozen=True):
    """The calls of one process. told_ms: clock of Redis"""

    told_ms: int
    calls: tuple[WaitingCall, ...]


def version_name(model: str, version: str) -> str:
    """A version among all that wait for each other. version: "" for the highest that is served"""
    return f"{model}/{version}"


def waiting(model: str, sequence: SequenceId | None = None) -> str:
    """An entry of a chain. sequence: whose step waits; None for a stateless request"""
    return model if sequence is None else f"{model}#{xxhash.xxh3_64_hexdigest(sequence.encode())}"


def models_of(chain: Sequence[str]) -> list[str]:
    """The models that wait in a chain, outermost first; their sequences are left out."""
    return [entry.partition("#")[0] for entry in chain]


def is_of_sequence(entry: str) -> bool:
    """Whether an entry of a chain says whose step waits; not so that of a stateless request."""
    return "#" in entry


def call_value(name: str, chain: Sequence[str]) -> str:
    """The value of the metadata key."""
    return ",".join(quote(part, safe="#/") for part in (name, *chain))


def read_call(value: str) -> CallOrigin:
    """Reads the value of the metadata key. Raises RequestError for one that `call_value` does not make."""
    name, *chain = map(unquote, value.split(","))
    if len(value) > VALUE_CHARS_MAX or len(chain) > CALL_DEPTH_MAX or not all(chain):
        raise RequestError(
            f"metadata '{CALL_KEY}' must name a call and at most {CALL_DEPTH_MAX} models that wait for it"
        )
    return CallOrigin(name, tuple(chain))
