"""The mesh's errors as gRPC statuses: code, text, and the trailing metadata that machines read."""

from __future__ import annotations

from typing import Any, NoReturn
from urllib.parse import quote

import grpc

from gateway.status import GRPC_STATUS, grpc_details
from shared.errors import Code, MeshError

DETAILS_BYTES_MAX = 4096
"""Longest status text, bytes as sent (percent-encoded). It travels in a header: clients refuse headers beyond 8 KiB,
and then nothing of the error reaches the caller. A python model's traceback can be longer."""
ELLIPSIS = " [...] "
STATUS: dict[Code, grpc.StatusCode] = {code: grpc.StatusCode[name] for code, name in GRPC_STATUS.items()}


async def abort(context: Any, error: MeshError) -> NoReturn:
    """Ends a call with the status that an error stands for. Raises what grpc.aio raises to unwind a handler."""
    await context.abort(STATUS[error.code], status_text(error.message), grpc_details(error))
    raise AssertionError("context.abort returned")


def status_text(message: str) -> str:
    """The message, with its middle left out when it is too long for a header."""
    kept = len(message)
    shortened = message
    while len(quote(shortened, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}")) > DETAILS_BYTES_MAX:
        kept = kept * 3 // 4
        # Of a traceback the end matters most, of other texts the beginning.
        shortened = message[: kept // 3] + ELLIPSIS + message[len(message) - 2 * kept // 3 :]
    return shortened
