"""Maps errors to the status of each protocol (triton-spec 5.2)."""

from __future__ import annotations

from shared.contract.errors import Code, MeshError
from shared.process import logs

HTTP_STATUS: dict[Code, int] = {
    Code.UNKNOWN: 400,
    Code.INTERNAL: 500,
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FORBIDDEN: 403,
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
    Code.RESOURCE_EXHAUSTED: "RESOURCE_EXHAUSTED",
    Code.FORBIDDEN: "PERMISSION_DENIED",
}
"""Names of `grpc.StatusCode`; plain text, so that the HTTP side needs no grpc."""


def http_error(error: MeshError) -> tuple[int, dict[str, str | int]]:
    """Status and JSON body of an error. The body of a SequenceError also has the reason, the sequence's last step, and
    what the client can do; that of a request that has asked about its wait, what is known of it."""
    return HTTP_STATUS[error.code], {"error": error.message, **error.facts}


def grpc_details(error: MeshError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of a sequence's error: `seqmesh-reason`, `seqmesh-last-step`, `seqmesh-retry`; and of one that
    has asked about its wait, for instance `seqmesh-place`."""
    return tuple((f"seqmesh-{name.replace('_', '-')}", str(value)) for name, value in error.facts.items())


def told_of(error: BaseException, event: str, **about: object) -> MeshError:
    """What a client hears of an error. One that is no MeshError is a defect of the gateway's own: it is logged, as this
    event."""
    if isinstance(error, MeshError):
        return error.released()
    logs.error(event, error, **about)
    return unexpected(error)


def unexpected(error: BaseException) -> MeshError:
    """What a client hears of a defect of the gateway's own."""
    return MeshError(f"internal error in the gateway: {type(error).__name__}", Code.INTERNAL)
