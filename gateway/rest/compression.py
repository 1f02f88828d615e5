"""gzip and deflate for bodies, with a bound on what a small body may unpack to. Pure; source: triton-spec 5.3."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from functools import partial

from gateway.bounds.inflate import GZIP_WINDOW, RAW_WINDOW, ZLIB_WINDOW, inflated
from shared.contract.errors import Code, RequestError

LEVEL = 1
"""Compression level. Higher levels hardly shrink tensor data further, and block the event loop for longer."""


class UnsupportedEncodingError(RequestError):
    """A Content-Encoding that is not supported. The response lists the supported ones."""

    code = Code.UNSUPPORTED


def unpacked(body: bytes, encoding: str, *, size_max: int) -> Iterator[bytes]:
    """A request body without its Content-Encoding, in pieces (`gateway.bounds.inflate`).

    size_max  bytes; larger content is refused before it is unpacked
    raises    RequestError for broken or too large data, UnsupportedEncodingError for another encoding
    """
    refuse = partial(too_large, size_max=size_max)
    match encoding.strip().lower():
        case "gzip":
            return inflated(body, GZIP_WINDOW, size_max, refuse)
        case "deflate":
            # Against the standard, some clients send deflate data without zlib's header.
            return inflated(body, ZLIB_WINDOW if _has_zlib_header(body) else RAW_WINDOW, size_max, refuse)
        case _:
            raise UnsupportedEncodingError("Unsupported compression type")


def is_packed(encoding: str) -> bool:
    """Whether a Content-Encoding changes anything."""
    return encoding.strip().lower() not in ("", "identity")


def _has_zlib_header(body: bytes) -> bool:
    try:
        zlib.decompressobj(ZLIB_WINDOW).decompress(body[:2])
    except zlib.error:
        return False
    return True


def too_large(size: int, size_max: int) -> RequestError:
    """The error of a body beyond the bound. size: bytes seen so far or announced."""
    return RequestError(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {size_max} bytes. Use "
        "--http-max-input-size to increase the limit."
    )


def choose(accept_encoding: str) -> str:
    """The encoding of a response: of identity, gzip and deflate the one with the highest weight; "" for identity."""
    best, best_weight = "", 0.0
    for part in accept_encoding.split(","):
        name, _, rest = part.strip().partition(";")
        name = name.strip().lower()
        weight = _weight(rest)
        if name in ("gzip", "deflate", "identity") and weight > best_weight:
            best, best_weight = name, weight
    return "" if best == "identity" else best


def _weight(parameters: str) -> float:
    key, _, value = parameters.strip().partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


def pack(body: bytes, encoding: str) -> bytes:
    """A response body in an encoding that `choose` named."""
    return gzip.compress(body, LEVEL, mtime=0) if encoding == "gzip" else zlib.compress(body, LEVEL)
