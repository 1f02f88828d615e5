"""What the mesh says is told apart from what the transport makes up, with reason and last step where there are some."""

from __future__ import annotations

import grpc
import pytest

from deploy.chaos.clients import BrokenError, RefusedError, http_refusal, told_by_grpc


def rpc_error(code: grpc.StatusCode, details: str, **metadata: str) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*((name.replace("_", "-"), value) for name, value in metadata.items()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:9: Socket closed", BrokenError),
        ("Stream removed (Socket closed)", BrokenError),
        ("GRPC server is shutting down and has stopped accepting new requests.", BrokenError),
        ("the connection to Redis was lost: it is not known whether the request was accepted", RefusedError),
        ("Redis, which holds every sequence, cannot be reached: try again later", RefusedError),
    ],
)
def test_unavailable_is_the_transports_or_the_meshs(details: str, kind: type[Exception]) -> None:
    assert kind is type(told_by_grpc(rpc_error(grpc.StatusCode.UNAVAILABLE, details)))


def test_a_message_that_grpc_could_not_write_is_a_lost_connection_and_other_internal_errors_are_the_meshs() -> None:
    assert isinstance(told_by_grpc(rpc_error(grpc.StatusCode.INTERNAL, "Internal error from Core")), BrokenError)
    cut_off = rpc_error(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")
    assert isinstance(told_by_grpc(cut_off), BrokenError)
    assert isinstance(told_by_grpc(rpc_error(grpc.StatusCode.INTERNAL, "the model failed")), RefusedError)


def test_the_kind_of_an_error_is_read_from_both_protocols() -> None:
    failed = told_by_grpc(rpc_error(grpc.StatusCode.INTERNAL, "the model failed"))

    assert isinstance(failed, RefusedError)
    assert "INTERNAL" == failed.code
    assert ["500", "502"] == [http_refusal(500, b'{"error": "no"}').code, http_refusal(502, b"<html>").code]


def test_reasons_are_read_from_both_protocols() -> None:
    metadata = {"seqmesh_reason": "expired", "seqmesh_last_step": "7"}
    for told in (
        told_by_grpc(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "no", **metadata)),
        http_refusal(400, b'{"error": "no", "reason": "expired", "last_step": 7}'),
    ):
        assert isinstance(told, RefusedError)
        assert ("expired", 7) == (told.reason, told.last_step)
    assert ("", -1) == (http_refusal(502, b"<html>").reason, http_refusal(502, b"<html>").last_step)
