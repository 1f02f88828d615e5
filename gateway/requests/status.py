"""Maps errors to the status of each protocol (triton-spec 5.2)."""

from __future__ import annotations

from shared.contract.errors import Code, MeshError
from shared.process import logs

STATUS: dict[Code, tuple[int, str]] = {
    Code.UNKNOWN: (400, "UNKNOWN"),
    Code.INTERNAL: (500, "INTERNAL"),
    Code.NOT_FOUND: (404, "NOT_FOUND"),
    Code.INVALID_ARG: (400, "INVALID_ARGUMENT"),
    Code.UNAVAILABLE: (503, "UNAVAILABLE"),
    Code.UNSUPPORTED: (501, "UNIMPLEMENTED"),
    Code.ALREADY_EXISTS: (400, "ALREADY_EXISTS"),
    Code.CANCELLED: (400, "CANCELLED"),
    Code.RESOURCE_EXHAUSTED: (429, "RESOURCE_EXHAUSTED"),
    Code.FORBIDDEN: (403, "PERMISSION_DENIED"),
}
"""Of HTTP and of gRPC: names of `grpc.StatusCode` in plain text, so that the HTTP side needs no grpc."""
HTTP_STATUS = {code: number for code, (number, _) in STATUS.items()}
GRPC_STATUS = {code: name for code, (_, name) in STATUS.items()}


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
    return MeshError(f"internal error in the gateway: {type(error).__name__}", Code.INTERNAL)
