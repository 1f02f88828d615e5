"""Converts the mesh's errors to gRPC statuses: code, text and machine-readable details.

A SequenceError carries its facts twice: as plain trailing metadata, and as the status details of gRPC's richer error
model (google.rpc.Status with an ErrorInfo), which client libraries in many languages can read. So does an error that
says when it is worth trying again (RetryInfo).
"""

from __future__ import annotations

from urllib.parse import quote

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status as RichStatus

from gateway.grpc.wire.opening import PLAIN, Metadata
from gateway.requests.status import GRPC_STATUS, grpc_details
from shared.contract.errors import Code, MeshError, SequenceError, shortened

DETAILS_BYTES_MAX = 4096
"""Longest status text, bytes as sent (percent-encoded). It travels in a header. Clients refuse headers beyond 8 KiB;
the application then sees nothing of the error. A python model's traceback can be longer."""
RICH_BYTES_MAX = 1024
"""Longest status text that is sent with details: the details repeat the text, and count for the same 8 KiB."""
DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "seqmesh"
"""The `domain` of the reasons in status details."""
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
NUMBERS: dict[Code, int] = {code: grpc.StatusCode[name].value[0] for code, name in GRPC_STATUS.items()}


def status_of(error: MeshError) -> tuple[int, str, Metadata]:
    """How a call ends: number and text of its status, and trailing metadata."""
    text = status_text(error.message)
    return NUMBERS[error.code], text, (*grpc_details(error), *status_details(error, text))


def status_details(error: MeshError, text: str) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with an error as google.rpc.Status, if there is more to say than its text.

    text  the status text
    """
    about: list[Message] = []
    if isinstance(error, SequenceError):
        facts = {name: str(value) for name, value in error.facts.items() if name != "reason"}
        about.append(ErrorInfo(reason=error.reason.upper(), domain=DOMAIN, metadata=facts))
    if error.retry_after_s is not None:
        about.append(RetryInfo(retry_delay=Duration(seconds=error.retry_after_s)))
    if not about or len(text.encode()) > RICH_BYTES_MAX:
        return ()
    details: list[AnyProto] = []
    for one in about:
        details.append(AnyProto())
        details[-1].Pack(one)
    # Clients refuse details whose code or text differs from the call's own.
    status = RichStatus(code=NUMBERS[error.code], message=text, details=details)
    return ((DETAILS_KEY, status.SerializeToString()),)


def status_text(message: str) -> str:
    """The message as a status text. The middle of a message that is too long for a header is left out."""
    kept, text = len(message), message
    while len(quote(text, safe=PLAIN)) > DETAILS_BYTES_MAX:
        kept = kept * 3 // 4
        text = shortened(message, kept)
    return text
