"""Tells a step that is sent again from a new one, by its request id together with its content. Pure.

The request id alone is not enough: clients count their requests from 1 in every run, under the same correlation ids.
The name of a model's call is enough, and its inputs do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from shared.contract.messages import StepFlag
from shared.contract.tensors import Tensor

DIGEST_BYTES = 12
"""Short, because a record keeps dozens of digests. All are of one client's requests, so no caller seeks a collision."""

_encode = msgspec.msgpack.Encoder().encode
_FLAGS = int(StepFlag.START | StepFlag.END)


def step_digest(request_id: str, flags: int, inputs: Sequence[Tensor]) -> bytes:
    """Equal for steps of a sequence with the same request id, START, END and inputs; b"" without a request id.

    Parameters and the timeout do not count: a client may give a retry less time. About 1 us, and 0.1 ms for a MiB.
    """
    if not request_id:
        return b""
    # With each length, so that bytes cannot move from one tensor to the next without changing the digest.
    about = [(tensor.name, tensor.datatype, tensor.shape, len(tensor.raw)) for tensor in inputs]
    whole = xxhash.xxh3_128(_encode((request_id, int(flags) & _FLAGS, about)))
    for tensor in inputs:
        whole.update(tensor.raw)
    return whole.digest()[:DIGEST_BYTES]
