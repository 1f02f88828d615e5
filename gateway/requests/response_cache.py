"""Which requests the response cache may answer: those of stateless models that have it enabled, if there is a cache.

The look into it is part of being queued, and so of the same round trip (`shared.store.work_scripts`). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gateway.requests.admission import Admitted
from shared.contract.messages import InferMessage, ModelRecord
from shared.contract.response_cache import entry_name, request_digest
from shared.store.work_scripts import Lookup


@dataclass(frozen=True, slots=True)
class ResponseCache:
    """What this gateway knows of the cache. size_bytes: what each shard may hold; 0: there is no cache."""

    size_bytes: int = 0

    def admitted(self, admitted: Admitted, record: ModelRecord) -> Admitted:
        """The stateless request, with what its answer may be stored for."""
        message = admitted.message
        if not self.size_bytes or message.version not in record.cache_scopes:
            return admitted
        marked = msgspec.structs.replace(message, cache_key=request_digest(message), cache_bytes=self.size_bytes)
        return msgspec.structs.replace(admitted, message=marked)


NO_CACHE = ResponseCache()


def lookup_of(message: InferMessage, record: ModelRecord) -> Lookup | None:
    """Where its answer may be; None for a request that is not looked up."""
    if not message.cache_key:
        return None
    name = entry_name(record.cache_scopes[message.version], record.generation, message.cache_key)
    return Lookup(name, record.generation, message.arrived_ns)
