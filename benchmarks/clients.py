"""Clients for HTTP with binary tensors, gRPC unary calls and gRPC streams. Each session has one step outstanding.

They are cheap on purpose, because client and servers share the machine. The parts of a request that do not change are
encoded once and joined with the rest as bytes. (Concatenated protobuf messages are one message with the fields of all.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast, get_args

import grpc
from tritonclient.grpc import service_pb2 as _service_pb2

from benchmarks.workloads import TensorForm

# The classes that protobuf generates at import have no types.
service_pb2: Any = _service_pb2
END_OF_STREAM: Any = getattr(grpc.aio, "EOF")  # noqa: B009 -- the library's stubs forget it

ProtocolName = Literal["http", "grpc", "grpc-stream"]
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)
SERVICE = "/inference.GRPCInferenceService/"
RAW_INPUT_CONTENTS_TAG = b"\x3a"
"""Field 7 of ModelInferRequest, length-delimited."""
END_OF_HEAD = b"\r\n\r\n"
ERROR_TEXT_MAX = 200
CLOSE_TIMEOUT_S = 2.0


class StepError(Exception):
    """The server refused a step, or the connection is gone."""


class LoadSession(Protocol):
    """A connection or stream that carries one step at a time."""

    async def step(self, sequence: int, data: bytes, *, start: bool, end: bool) -> bytes:
        """Sends INPUT, returns OUTPUT. Raises `StepError`."""
        ...

    async def close(self) -> None:
        """Closes the session in order."""
        ...


class BenchClient(Protocol):
    """One protocol's way to one server: makes the sessions that carry sequences."""

    async def session(self) -> LoadSession:
        """A new session. Raises `StepError`."""
        ...

    async def close(self) -> None:
        """Closes the connections that the sessions share."""
        ...


def client_for(protocol: ProtocolName, address: Addresses, model: str, form: TensorForm) -> BenchClient:
    if protocol == "http":
        return KeepAliveHttpClient(address, model, form)
    return GrpcClient(address, model, form, stream=protocol == "grpc-stream")


class Addresses:
    """Where a server listens."""

    def __init__(self, host: str, http_port: int, grpc_port: int) -> None:
        self.host = host
        self.http_port = http_port
        self.grpc = f"{host}:{grpc_port}"
        self.http = f"http://{host}:{http_port}"


# -- HTTP -------------------------------------------------------------------------------------------------------------


class KeepAliveHttpClient:
    """One keep-alive connection per session."""

    def __init__(self, address: Addresses, model: str, form: TensorForm) -> None:
        self._address = address
        self._head = (
            f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {address.host}:{address.http_port}\r\n"
            "Content-Type: application/octet-stream\r\nInference-Header-Content-Length: "
        ).encode()
        shape = ",".join(map(str, form.shape))
        self._document_end = (
            f'"binary_data_output":true}},"inputs":[{{"name":"INPUT","datatype":"{form.datatype}","shape":[{shape}],'
            f'"parameters":{{"binary_data_size":{form.size_bytes}}}}}]}}'
        )

    async def session(self) -> HttpSession:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(HttpConnection, self._address.host, self._address.http_port)
        except OSError as error:
            raise StepError(f"cannot connect: {error}") from error
        return HttpSession(connection, self._request)

    async def close(self) -> None:
        """Does nothing: sessions share no connection."""

    def _request(self, sequence: int, data: bytes, *, start: bool, end: bool) -> bytes:
        document = (
            f'{{"parameters":{{"sequence_id":{sequence},"sequence_start":{json_bool(start)},'
            f'"sequence_end":{json_bool(end)},{self._document_end}'
        ).encode()
        lengths = b"%d\r\nContent-Length: %d\r\n\r\n" % (len(document), len(document) + len(data))
        return b"".join((self._head, lengths, document, data))


def json_bool(value: bool) -> str:  # noqa: FBT001 -- the value is what it is about
    return "true" if value else "false"


class HttpSession:
    """A connection of its own, for one sequence at a time."""

    def __init__(self, connection: HttpConnection, request: Callable[..., bytes]) -> None:
        self._connection = connection
        self._request = request

    async def step(self, sequence: int, data: bytes, *, start: bool, end: bool) -> bytes:
        status, document_bytes, body = await self._connection.exchange(
            self._request(sequence, data, start=start, end=end)
        )
        if status != 200:
            raise StepError(f"HTTP {status}: {body[:ERROR_TEXT_MAX].decode(errors='replace')}")
        # There is only one output, so the bytes after the JSON document are its data.
        return body[document_bytes:]

    async def close(self) -> None:
        self._connection.close()


class HttpConnection(asyncio.Protocol):
    """The part of HTTP/1.1 that both servers use: one answer at a time, with a Content-Length."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._waiter: asyncio.Future[tuple[int, int, bytes]] | None = None

    async def exchange(self, request: bytes) -> tuple[int, int, bytes]:
        """Sends a request; returns status, Inference-Header-Content-Length (else the body's length), body."""
        if self._transport is None:
            raise StepError("the connection is closed")
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiter

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(StepError(f"connection lost: {exc or 'closed by the server'}"))

    def data_received(self, data: bytes) -> None:
        """Called by the loop. Answers the waiter when the whole body is here."""
        self._received = self._received + data if self._received else data
        head_end = self._received.find(END_OF_HEAD)
        if head_end < 0:
            return
        status, body_bytes, document_bytes = parse_head(self._received[:head_end])
        body = self._received[head_end + len(END_OF_HEAD) :]
        if len(body) < body_bytes:
            return
        self._received = b""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result((status, document_bytes, body))


def parse_head(head: bytes) -> tuple[int, int, int]:
    """Status, Content-Length and Inference-Header-Content-Length (by default the former) of an answer's head."""
    status_line, *lines = head.lower().split(b"\r\n")
    lengths = {b"content-length": 0, b"inference-header-content-length": -1}
    for line in lines:
        name, _, value = line.partition(b":")
        if name in lengths:
            lengths[name] = int(value)
    body_bytes, document_bytes = lengths.values()
    return int(status_line[9:12]), body_bytes, body_bytes if document_bytes < 0 else document_bytes


# -- gRPC -------------------------------------------------------------------------------------------------------------


class GrpcClient:
    """One channel for all sessions. A session is a stream of its own, or makes unary calls."""

    def __init__(self, address: Addresses, model: str, form: TensorForm, *, stream: bool) -> None:
        # Its own connection pool: otherwise gRPC would reuse the connections of the cell before.
        self._channel = grpc.aio.insecure_channel(address.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
        kind = self._channel.stream_stream if stream else self._channel.unary_unary
        answer: Any = service_pb2.ModelStreamInferResponse if stream else service_pb2.ModelInferResponse
        method = "ModelStreamInfer" if stream else "ModelInfer"
        self._call: Any = kind(SERVICE + method, request_serializer=None, response_deserializer=answer.FromString)
        self._session = GrpcStreamSession if stream else GrpcSession
        self._bytes = RequestBytes(model, form)

    async def session(self) -> LoadSession:
        """A session; a stream opens with its first step."""
        return self._session(self._call, self._bytes)

    async def close(self) -> None:
        await self._channel.close()


class RequestBytes:
    """Builds requests. Parts that repeat are encoded once."""

    def __init__(self, model: str, form: TensorForm) -> None:
        message: Any = service_pb2.ModelInferRequest(model_name=model)
        message.inputs.add(name="INPUT", datatype=form.datatype, shape=form.shape)
        message.outputs.add(name="OUTPUT")
        declared = message.SerializeToString()
        tag = RAW_INPUT_CONTENTS_TAG + varint(form.size_bytes)
        self._parts = {
            (start, end): (declared + flags(start=start, end=end), tag)
            for start in (False, True)
            for end in (False, True)
        }

    def sequence(self, sequence: int) -> bytes:
        """The part that names the sequence."""
        message: Any = service_pb2.ModelInferRequest()
        message.parameters["sequence_id"].int64_param = sequence
        return message.SerializeToString()

    def request(self, sequence: bytes, data: bytes, *, start: bool, end: bool) -> bytes:
        """A whole ModelInferRequest."""
        head, tag = self._parts[start, end]
        return b"".join((head, sequence, tag, data))


def flags(*, start: bool, end: bool) -> bytes:
    """The part with the sequence's flags."""
    message: Any = service_pb2.ModelInferRequest()
    message.parameters["sequence_start"].bool_param = start
    message.parameters["sequence_end"].bool_param = end
    return message.SerializeToString()


def varint(number: int) -> bytes:
    """A non-negative number as protobuf writes it."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


class GrpcSession:
    """Unary calls, one after the other."""

    def __init__(self, call: Any, parts: RequestBytes) -> None:
        self._call = call
        self._parts = parts
        self._sequence: tuple[int, bytes] = (0, b"")

    def _request(self, sequence: int, data: bytes, *, start: bool, end: bool) -> bytes:
        if self._sequence[0] != sequence:
            self._sequence = sequence, self._parts.sequence(sequence)
        return self._parts.request(self._sequence[1], data, start=start, end=end)

    async def step(self, sequence: int, data: bytes, *, start: bool, end: bool) -> bytes:
        try:
            answer = await self._call(self._request(sequence, data, start=start, end=end))
        except grpc.aio.AioRpcError as error:
            raise StepError(f"{error.code().name}: {(error.details() or '')[:ERROR_TEXT_MAX]}") from None
        return output_of(answer)

    async def close(self) -> None:
        """Nothing is open between two calls."""


class GrpcStreamSession(GrpcSession):
    """A ModelStreamInfer call that carries one sequence after the other, one step under way."""

    _stream: Any = None

    async def step(self, sequence: int, data: bytes, *, start: bool, end: bool) -> bytes:
        if self._stream is None:
            self._stream = self._call()
        try:
            await self._stream.write(self._request(sequence, data, start=start, end=end))
            answer = await self._stream.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self._stream = None
            raise StepError(f"the stream broke: {str(error)[:ERROR_TEXT_MAX]}") from None
        if answer is END_OF_STREAM:
            self._stream = None
            raise StepError("the server ended the stream")
        if answer.error_message:
            raise StepError(answer.error_message[:ERROR_TEXT_MAX])
        return output_of(answer.infer_response)

    async def close(self) -> None:
        """Half-closes the stream. Cancels it if the server does not end it then."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await stream.done_writing()
                await stream.read()
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            stream.cancel()


def output_of(response: Any) -> bytes:
    """OUTPUT's bytes. Raises `StepError` when the answer does not have exactly one tensor as bytes."""
    if len(response.raw_output_contents) != 1:
        raise StepError(f"{len(response.raw_output_contents)} raw outputs instead of one")
    content: bytes = response.raw_output_contents[0]
    return content
