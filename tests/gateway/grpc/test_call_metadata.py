"""Metadata: only what means something to the mesh is read."""

from __future__ import annotations

import pytest

from gateway.grpc.metadata import NO_METADATA, CallMetadata, call_metadata, with_deadline
from shared.contract.calls import CALL_KEY, CallOrigin, call_value
from shared.contract.errors import RequestError


def test_metadata_without_meaning_gives_the_shared_empty_value() -> None:
    assert call_metadata((("user-agent", "grpc-python"), ("x-bin", b"\x00"))) is NO_METADATA
    assert call_metadata(()) is NO_METADATA


def test_trace_context_session_and_error_mode_are_read() -> None:
    pairs = (
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("tracestate", "congo=t61rcWkgMzE"),
        ("inference-session-id", "session_abc"),
        ("triton_grpc_error", "true"),
    )
    expected = CallMetadata(
        {
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "tracestate": "congo=t61rcWkgMzE",
        },
        session_id="session_abc",
        status_on_error=True,
    )

    assert expected == call_metadata(pairs)


def test_a_call_of_a_model_is_read_with_the_deadline_of_its_rpc() -> None:
    origin = CallOrigin("call-1", ("a", "b#1f"))
    read = call_metadata(((CALL_KEY, call_value(origin.name, origin.chain)),))

    assert origin == read.call
    assert read is with_deadline(read, None, 0)
    late = with_deadline(read, 1.5, 10**15).call
    assert late is not None
    assert 10**9 + 1500 == late.deadline_ms
    assert NO_METADATA is with_deadline(NO_METADATA, 1.5, 10**15)


@pytest.mark.parametrize("value", ["false", "True", "1", ""])
def test_any_other_value_leaves_errors_in_the_stream(value: str) -> None:
    assert not call_metadata((("triton_grpc_error", value),)).status_on_error


def test_two_sessions_of_one_call_are_refused() -> None:
    one, other = ("inference-session-id", "a"), ("inference-session-id", "b")

    assert "a" == call_metadata((one, one)).session_id
    with pytest.raises(RequestError, match="two values, 'a' and 'b': send one"):
        call_metadata((one, other))


def test_two_tenants_of_one_call_are_refused() -> None:
    acme, rival = ("seqmesh-tenant", "acme"), ("seqmesh-tenant", "rival")

    assert "acme" == call_metadata((acme, acme)).tenant
    with pytest.raises(RequestError, match="two tenants, 'acme' and 'rival'"):
        call_metadata((acme, rival))
