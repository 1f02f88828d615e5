"""Which requests the response cache may answer: requests to stateless models that enable it, if there is a cache. Pure.

The cache is looked up by the script that queues the request, so it costs no round trip (`shared.store.work_scripts`).
"""

from __future__ import annotations

import msgspec

from gateway.requests.admission import Admitted
from shared.contract.messages import InferMessage, ModelRecord
from shared.contract.response_cache import entry_name, request_digest
from shared.store.work_scripts import Lookup


def with_cache_key(admitted: Admitted, record: ModelRecord, cache_bytes: int) -> Admitted:
    """The stateless request with its cache key, if its answer may be stored.

    cache_bytes  bound of each shard's part of the response cache; 0: no cache
    """
    message = admitted.message
    if not cache_bytes or message.version not in record.cache_scopes:
        return admitted
    message = msgspec.structs.replace(message, cache_key=request_digest(message), cache_bytes=cache_bytes)
    return msgspec.structs.replace(admitted, message=message)


def lookup_of(message: InferMessage, record: ModelRecord) -> Lookup | None:
    """Where the answer to this request may be stored; None for a request that is not looked up."""
    if not message.cache_key:
        return None
    name = entry_name(record.cache_scopes[message.version], record.generation, message.cache_key)
    return Lookup(name, record.generation, message.arrived_ns)
