"""The response cache, as far as it is pure: what makes two requests equal, what an answer is stored under, its option.

Only stateless requests of models with `response_cache` enabled are looked up, and only answers without an error are
stored. The cache lies in Redis, in the shard of the model's work queue (`shared/store/lua/cache.lua`): requests are
looked up as they are queued, and an answer is stored as it is given, so whoever has an answer finds it stored, on every
gateway.

An answer is stored under what computed it, by the executor, and looked up under what the mesh says it serves: one that
comes from a predecessor's files is never taken for its successor's.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from shared.contract.messages import InferMessage

DIGEST_BYTES = 16
SIZE_BYTES_MAX = 1 << 50
"""Redis counts with 64 bits, its scripts with 53."""
OPTION = re.compile(r"local,size=([0-9]{1,20})")

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def request_digest(message: InferMessage) -> str:
    """Equal for requests that get the same answer: what the model is given, and which outputs are asked for.

    Inputs and outputs count in the order of their names. Triton 2.51 looks at model and inputs alone, and so answers
    for one output with another one, and regardless of parameters. Request id, priority and timeout do not count.
    """
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    inputs = sorted(message.inputs, key=lambda tensor: tensor.name)
    about = [(tensor.name, tensor.datatype, tensor.shape, len(tensor.raw)) for tensor in inputs]
    whole.update(
        _encode(
            (
                message.model,
                message.version,
                about,
                sorted(message.outputs),
                message.correlation_id,
                message.parameters,
            )
        )
    )
    for tensor in inputs:
        whole.update(tensor.raw)
    return whole.hexdigest()


def entry_name(scope: str, generation: str, digest: str) -> str:
    """What an answer is stored under. scope: of the model version's files and configuration; generation: its load."""
    return f"{scope}.{generation}.{digest}"


def parse_cache_config(text: str) -> int:
    """Bytes that the cache of a shard may hold, from Triton's option `<cache>,<setting>=<value>`; 0: there is none.

    Raises ValueError. The mesh's cache is called `local`, like the one that Triton brings.
    """
    if not text:
        return 0
    found = OPTION.fullmatch(text)
    if found is None or not 0 < int(found[1]) <= SIZE_BYTES_MAX:
        raise ValueError(f"'{text}' is not 'local,size=<bytes>': the mesh has one cache, with this one setting")
    return int(found[1])
