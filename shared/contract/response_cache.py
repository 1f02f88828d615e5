"""The pure part of the response cache: which requests are equal, under which name an answer is stored, and the option.

Only stateless requests of models with `response_cache` enabled are looked up, and only answers without an error are
stored. The cache lies in Redis, in the shard of the model's work queue (`shared/store/lua/cache.lua`). Requests are
looked up as they are queued, and an answer is stored in the call that sends it. So a client that has an answer finds it
stored, on every gateway.

An executor stores an answer under the files that computed it; a gateway looks it up under the files that the mesh says
it serves. So an answer from a predecessor's files is never taken for its successor's.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from shared.contract.messages import InferMessage

DIGEST_BYTES = 16
SIZE_BYTES_MAX = 1 << 50
"""Well below 2^53, up to which the scripts count exactly."""
OPTION = re.compile(r"local,size=([0-9]{1,20})")

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def request_digest(message: InferMessage) -> str:
    """Equal for requests that get the same answer: they give the model the same, and ask for the same outputs.

    Inputs and outputs count in the order of their names. Triton 2.51 compares model and inputs only; so it answers a
    request for one output with another output, and ignores parameters. Request id, priority and timeout do not count.
    """
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    inputs = sorted(message.inputs, key=lambda tensor: tensor.name)
    # With each length, so that bytes cannot move from one tensor to the next without changing the digest.
    about = [(tensor.name, tensor.datatype, tensor.shape, len(tensor.raw)) for tensor in inputs]
    whole.update(
        _encode(
            (
                message.model,
                message.version,
                about,
                sorted(message.outputs),
                message.correlation_id,
                message.flags,
                message.parameters,
            )
        )
    )
    for tensor in inputs:
        whole.update(tensor.raw)
    return whole.hexdigest()


def entry_name(scope: str, generation: str, digest: str) -> str:
    """The name of an answer in the cache.
    scope: of the model version's files and configuration; generation: its load
    """
    return f"{scope}.{generation}.{digest}"


def parse_cache_config(text: str) -> int:
    """Bytes that the cache of a shard may hold, from Triton's option `<cache>,<setting>=<value>`; 0: there is no cache.

    Raises ValueError. The mesh's cache is called `local`, like the one that Triton brings.
    """
    if not text:
        return 0
    found = OPTION.fullmatch(text)
    if found is None or not 0 < int(found[1]) <= SIZE_BYTES_MAX:
        raise ValueError(f"'{text}' is not 'local,size=<bytes>': the mesh has one cache, with this one setting")
    return int(found[1])
