"""Reads a call's metadata: trace context, session, how a stream reports errors, and keys to forward. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gateway.requests.headers import forwarded, only_value
from shared.contract.calls import CALL_KEY, CallOrigin, read_call
from shared.contract.tenants import TENANT_HEADER, tenant_of

TRACE_KEYS = frozenset({"traceparent", "tracestate"})
"""W3C trace context; gRPC's metadata keys are lower-case already."""
SESSION_KEY = "inference-session-id"
"""The HTTP header `Inference-Session-Id` in gRPC's lower case; in requests and in the answer's metadata."""
STATUS_ON_ERROR_KEY = "triton_grpc_error"
"""`true`: a stream ends with the status of its first error, instead of carrying it as a message (triton-spec 6)."""


@dataclass(frozen=True, slots=True)
class CallMetadata:
    """The metadata keys that have a meaning for the mesh. All others are ignored.

    forwarded  keys and values that become parameters of each request
    tenant     on whose behalf the call comes; "": it does not say
    call       of a call that a model made: its name and who waits for it; None for a client's
    """

    trace_headers: Mapping[str, str]
    session_id: str | None = None
    status_on_error: bool = False
    forwarded: Mapping[str, str] = field(default_factory=dict[str, str])
    call: CallOrigin | None = None
    tenant: str = ""


NO_METADATA = CallMetadata({})
"""Most calls have none of the keys. They share this value, which is never changed."""


def call_metadata(pairs: Iterable[tuple[str, str | bytes]], forward: re.Pattern[str] | None = None) -> CallMetadata:
    """Reads a call's metadata. Binary values (of keys that end in -bin) are ignored.

    forward  keys that match this pattern become parameters
    raises   RequestError for such a key that already has a meaning as a parameter, and for what is no call's origin or
             no tenant, and for two tenants or two sessions
    """
    trace: dict[str, str] = {}
    call: CallOrigin | None = None
    session_id: str | None = None
    tenant = ""
    status_on_error = False
    texts = [(key, value) for key, value in pairs if isinstance(value, str)]
    for key, value in texts:
        if key in TRACE_KEYS:
            trace[key] = value
        elif key == SESSION_KEY:
            session_id = only_value(f"metadata '{SESSION_KEY}'", value, session_id)
        elif key == STATUS_ON_ERROR_KEY:
            status_on_error = value == "true"
        elif key == TENANT_HEADER:
            tenant = tenant_of(value, tenant)
        elif key == CALL_KEY:
            call = read_call(value)
    parameters = forwarded(texts, forward) if forward is not None else {}
    if not trace and session_id is None and not status_on_error and not parameters and call is None and not tenant:
        return NO_METADATA
    return CallMetadata(trace, session_id, status_on_error, parameters, call, tenant)


def with_deadline(metadata: CallMetadata, left_s: float | None, now_ns: int) -> CallMetadata:
    """The metadata of a model's call, with the deadline of its RPC. left_s: until then; None: there is none"""
    if metadata.call is None or left_s is None:
        return metadata
    return replace(metadata, call=replace(metadata.call, deadline_ms=int(now_ns / 1e6 + left_s * 1000)))
