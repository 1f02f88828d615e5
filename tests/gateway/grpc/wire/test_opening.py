"""The headers that open a call, and those that end it."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from gateway.grpc.wire.opening import NoRpcError, read_opening, read_timeout, trailers
from shared.contract.errors import RequestError

POST = [(b":method", b"POST"), (b":path", b"/s/M"), (b":scheme", b"http"), (b"te", b"trailers")]
GRPC = (b"content-type", b"application/grpc")


def test_an_opening_has_the_path_the_metadata_and_how_its_caller_speaks() -> None:
    opening = read_opening(
        [
            *POST,
            (b"content-type", b"application/grpc+proto"),
            (b"grpc-timeout", b"1500m"),
            (b"grpc-encoding", b"gzip"),
            (b"grpc-accept-encoding", b"identity, gzip"),
            (b"user-agent", b"test"),
            (b"key", b"value"),
            (b"raw-bin", b"AAE"),
        ]
    )

    assert opening.path == "/s/M"
    assert [("user-agent", "test"), ("key", "value"), ("raw-bin", b"\x00\x01")] == opening.metadata
    assert (1.5, "gzip", {"identity", "gzip"}) == (opening.timeout_s, opening.encoding, opening.accepts)


def test_metadata_that_cannot_be_read_is_left_out() -> None:
    opening = read_opening([*POST, GRPC, (b"text", b"\xff"), (b"raw-bin", b"A"), (b"two-bin", b"AA==,AQ")])

    assert [("two-bin", b"\x00"), ("two-bin", b"\x01")] == opening.metadata


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b":method", b"GET"), GRPC], HTTPStatus.METHOD_NOT_ALLOWED),
        ([*POST, (b"content-type", b"application/json")], HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
        ([*POST, (b"content-type", b"application/grpc-web")], HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
        (POST, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    ],
)
def test_what_is_no_grpc_is_answered_by_a_status_of_http(
    headers: list[tuple[bytes, bytes]], status: HTTPStatus
) -> None:
    with pytest.raises(NoRpcError) as refused:
        read_opening(headers)

    assert refused.value.status is status


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2H", 7200), ("3M", 180), ("4S", 4), ("5m", 0.005), ("6u", 6e-6), ("7n", 7e-9), ("99999999S", 99999999)],
)
def test_a_timeout_has_a_unit(text: str, seconds: float) -> None:
    assert read_timeout(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "S", "-1S", "123456789S", "1.5S", "1s", "1S "])
def test_what_is_no_timeout_is_none(text: str) -> None:
    assert read_timeout(text) is None


def test_a_status_text_is_escaped_and_binary_metadata_is_base64() -> None:
    ended = trailers(5, "100 % ü\n", (("reason", "gone"), ("details-bin", b"\x00\x01")))

    assert ended == [
        (b"grpc-status", b"5"),
        (b"grpc-message", b"100 %25 %C3%BC%0A"),
        (b"reason", b"gone"),
        (b"details-bin", b"AAE"),
    ]


def test_a_call_that_succeeds_has_no_text() -> None:
    assert trailers(0) == [(b"grpc-status", b"0")]


def test_values_that_come_in_one_header_count_as_if_each_came_in_its_own() -> None:
    """Else 16 KB become 16,000 entries of metadata, which a call keeps."""
    assert 401 == len(read_opening([*POST, GRPC, (b"a-bin", b"," * 400)]).metadata)
    with pytest.raises(RequestError, match="of at most 16384"):
        read_opening([*POST, GRPC, (b"a-bin", b"," * 600)])


def test_of_the_encodings_that_a_caller_reads_only_known_ones_are_kept() -> None:
    many = ",".join(map(str, range(3000))).encode()
    assert {"deflate"} == read_opening([*POST, GRPC, (b"grpc-accept-encoding", many + b", deflate")]).accepts
