"""Which requests the response cache may answer: requests to stateless models that enable it, if there is a cache. Pure.

The cache is looked up by the script that queues the request, so it costs no round trip (`shared.store.work_scripts`).
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
    """The response cache as this gateway was configured. size_bytes: bound of each shard's part; 0: no cache."""

    size_bytes: int = 0

    def admitted(self, admitted: Admitted, record: ModelRecord) -> Admitted:
        """The stateless request, marked with its cache key if its answer may be stored."""
        message = admitted.message
        if not self.size_bytes or message.version not in record.cache_scopes:
            return admitted
        marked = msgspec.structs.replace(message, cache_key=request_digest(message), cache_bytes=self.size_bytes)
        return msgspec.structs.replace(admitted, message=marked)


NO_CACHE = ResponseCache()


def lookup_of(message: InferMessage, record: ModelRecord) -> Lookup | None:
    """Where the answer to this request may be stored; None for a request that is not looked up."""
    if not message.cache_key:
        return None
    name = entry_name(record.cache_scopes[message.version], record.generation, message.cache_key)
    return Lookup(name, record.generation, message.arrived_ns)
