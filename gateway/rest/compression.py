"""gzip and deflate for bodies, with a bound on what a small body may unpack to. Pure; source: triton-spec 5.3."""

from __future__ import annotations

import gzip
import zlib

from shared.errors import Code, RequestError

GZIP_WINDOW = 31
ZLIB_WINDOW = 15
RAW_WINDOW = -15
LEVEL = 1
"""Tensor data hardly shrinks more at higher levels, and the event loop waits for it."""


class UnsupportedEncodingError(RequestError):
    """A Content-Encoding that is not served; the response says which ones are."""

    code = Code.UNSUPPORTED


def unpack(body: bytes, encoding: str, *, size_max: int) -> bytes:
    """A request body without its Content-Encoding.

    size_max  bytes; larger content is refused before it is unpacked
    raises    RequestError for broken or too large data, UnsupportedEncodingError for another encoding
    """
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case "gzip":
            return _inflate(body, GZIP_WINDOW, size_max)
        case "deflate":
            try:
                return _inflate(body, ZLIB_WINDOW, size_max)
            except BrokenDataError:
                # Some clients send the stream without zlib's header, against the standard.
                return _inflate(body, RAW_WINDOW, size_max)
        case _:
            raise UnsupportedEncodingError("Unsupported compression type")


class BrokenDataError(RequestError):
    """A body that is not what its Content-Encoding says."""


def _inflate(body: bytes, window: int, size_max: int) -> bytes:
    reader = zlib.decompressobj(window)
    try:
        content = reader.decompress(body, size_max + 1)
    except zlib.error as error:
        raise BrokenDataError(f"failed to decompress the request body: {error}") from error
    if len(content) > size_max:
        raise too_large(len(content), size_max)
    if not reader.eof:
        raise BrokenDataError("failed to decompress the request body: it ends in the middle")
    return content


class BodyTooLargeError(RequestError):
    """A body beyond the bound. What is left of it will not be read."""


def too_large(size: int, size_max: int) -> BodyTooLargeError:
    """A body beyond the bound; size: bytes seen so far or announced."""
    return BodyTooLargeError(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {size_max} bytes. Use "
        "--http-max-input-size to increase the limit."
    )


def choose(accept_encoding: str) -> str:
    """The encoding of a response: the best weighted of identity, gzip and deflate; "" means identity."""
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
