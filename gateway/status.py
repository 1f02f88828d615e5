"""Error codes to the status of each protocol: the one table for both (triton-spec 5.2)."""

from __future__ import annotations

from shared.errors import Code, MeshError, SequenceError

HTTP_STATUS: dict[Code, int] = {
    Code.UNKNOWN: 400,
    Code.INTERNAL: 500,
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
}

GRPC_STATUS: dict[Code, str] = {
    Code.UNKNOWN: "UNKNOWN",
    Code.INTERNAL: "INTERNAL",
    Code.NOT_FOUND: "NOT_FOUND",
    Code.INVALID_ARG: "INVALID_ARGUMENT",
    Code.UNAVAILABLE: "UNAVAILABLE",
    Code.UNSUPPORTED: "UNIMPLEMENTED",
    Code.ALREADY_EXISTS: "ALREADY_EXISTS",
    Code.CANCELLED: "CANCELLED",
}
"""Names of `grpc.StatusCode`; plain text, so that the HTTP side needs no grpc."""


def http_error(error: MeshError) -> tuple[int, dict[str, str | int]]:
    """Status and JSON body of an error; a sequence's error also says why, and which step was its last."""
    body: dict[str, str | int] = {"error": error.message}
    if isinstance(error, SequenceError):
        body["reason"] = error.reason.value
        body["last_step"] = error.last_step
    return HTTP_STATUS[error.code], body


def grpc_details(error: MeshError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of an error: `seqmesh-reason` and `seqmesh-last-step` of a sequence's error."""
    if isinstance(error, SequenceError):
        return (("seqmesh-reason", error.reason.value), ("seqmesh-last-step", str(error.last_step)))
    return ()
