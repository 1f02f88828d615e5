"""A connection, frame by frame: what is received and sent, what is refused, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import struct
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import ContinuationFrame, DataFrame, GoAwayFrame, HeadersFrame, PingFrame

from gateway.grpc.pb import pb
from gateway.grpc.server import GrpcServer, serve_grpc
from gateway.grpc.servicer import InferenceServicer
from gateway.grpc.wire.connection import GrpcConnection
from gateway.grpc.wire.http2 import SWEEP_AT_LEAST, WINDOW_BYTES, Http2
from gateway.grpc.wire.messages import prefixed
from gateway.grpc.wire.rpc import Rpc
from gateway.grpc.wire.rules import SPARE, RpcLimit
from gateway.ports.turns import LoopTurns
from gateway.requests.waiting import Answer
from gateway.settings import GatewaySettings
from shared.contract.errors import RequestError
from shared.contract.messages import ReplyMessage
from shared.contract.tensors import Tensor
from tests.gateway.cycles import nothing_stays
from tests.gateway.grpc.conftest import RECORD
from tests.gateway.grpc.test_intake import sized
from tests.gateway.grpc.wire.peer import INFER, LIVE, SOON_S, STREAM, Peer, peer_of

Serving = Callable[..., contextlib.AbstractAsyncContextManager[GrpcServer]]
TLS = Path(__file__).parents[3] / "fixtures" / "tls"
SECURE = {
    "grpc_use_ssl": True,
    "grpc_server_cert": str(TLS / "server.pem"),
    "grpc_server_key": str(TLS / "server.key"),
}
NEWEST = (1 << 31) - 1
FLOOD = 2_000
UNFINISHED_BYTES_MAX = 4 << 20
"""Of h2 alone, a connection may keep 16 MiB."""
PINGS_MAX_BYTES = 64 << 20
"""More than the system buffers in both directions."""
ANSWER_BYTES, PART_BYTES = 1 << 20, 1 << 18
"""Of an answer that the system buffers; and more of it than what a client with small buffers has before it reads."""


@pytest.fixture
def serving(
    make_servicer: Callable[..., InferenceServicer], grpc_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> Serving:
    """Serves the twins, with settings that differ from the default, and looks after connections often."""
    monkeypatch.setattr("gateway.ports.serving.CHECK_S", 0.02)

    @contextlib.asynccontextmanager
    async def serve(*, connections_max: int = 100, **changes: Any) -> AsyncGenerator[GrpcServer]:
        settings = replace(grpc_settings, **changes)
        server = await serve_grpc(make_servicer(settings), settings, connections_max=connections_max)
        try:
            yield server
        finally:
            await server.stop(0)

    return serve


@pytest.fixture
async def peer(rpc_server: GrpcServer) -> AsyncIterator[Peer]:
    async with peer_of(rpc_server.port) as peer:
        yield peer


async def is_served(peer: Peer) -> bool:
    number = peer.call(LIVE)
    peer.say(number, b"")
    return await peer.status(number) == ("0", "")


async def test_of_the_clients_that_send_at_one_moment_some_are_heard_in_a_turn_of_the_loop(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, heard = LoopTurns(), set[int]()
    begins = GrpcConnection._begins

    def noted(self: GrpcConnection, event: Any) -> None:
        heard.add(turns.number)
        begins(self, event)

    monkeypatch.setattr(GrpcConnection, "_begins", noted)
    monkeypatch.setattr("gateway.ports.turns.ENTERING_MAX", 1)
    async with serving() as server, contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(peer_of(server.port)) for _ in range(20)]
        assert all([await is_served(peer) for peer in peers])
        heard.clear()
        assert all(await asyncio.gather(*(is_served(peer) for peer in peers)))

    # Two turns, one after the other, may be counted as one.
    assert len(heard) >= len(peers) // 2


async def test_of_the_clients_that_come_at_one_moment_some_are_let_in_in_a_turn_of_the_loop(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, made = LoopTurns(), list[int]()
    connection_made = GrpcConnection.connection_made

    def noted(self: GrpcConnection, transport: asyncio.BaseTransport) -> None:
        made.append(turns.number)
        connection_made(self, transport)

    monkeypatch.setattr(GrpcConnection, "connection_made", noted)
    monkeypatch.setattr("gateway.ports.turns.ENTERING_MAX", 1)
    async with serving() as server:
        # The system accepts them all before the server's first turn.
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        async with asyncio.timeout(SOON_S):
            while len(made) < len(clients):
                await asyncio.sleep(0)
        for client in clients:
            client.close()

    # Two turns, one after the other, may be counted as one.
    assert len(set(made)) >= len(clients) // 2


# -- calls ------------------------------------------------------------------------------------------------------------


async def test_a_path_that_is_not_served_is_unimplemented(peer: Peer) -> None:
    number = peer.call("/inference.GRPCInferenceService/Nothing")
    peer.say(number, b"")

    assert await peer.status(number) == ("12", "Method not found!")
    assert await is_served(peer)


@pytest.mark.parametrize(
    ("replaced", "status"), [({"content_type": "application/json"}, "415"), ({":method": "GET"}, "405")]
)
async def test_what_is_no_grpc_gets_a_status_of_http(peer: Peer, replaced: dict[str, Any], status: str) -> None:
    for is_whole in (True, False):
        number = peer.call(LIVE, end=is_whole, **replaced)
        await peer.until(lambda number=number: number in peer.ended)
        if not is_whole:  # nothing is kept for the rest
            await peer.until(lambda number=number: peer.reset.get(number) == ErrorCodes.NO_ERROR)

        assert peer.headers[number][":status"] == status
    assert await is_served(peer)


@pytest.mark.parametrize("length", ["7", "many"])
async def test_a_content_length_that_is_wrong_harms_nobody(peer: Peer, length: str) -> None:
    """It comes with metadata that an application has taken over from a request of HTTP."""
    number = peer.call(LIVE, content_length=length)
    peer.writer.write(DataFrame(number, data=prefix(b""), flags=["END_STREAM"]).serialize())

    assert await peer.status(number) == ("0", "")
    assert await is_served(peer)


async def test_a_call_that_is_refused_at_its_headers_which_are_all_of_it_harms_no_other_call(peer: Peer) -> None:
    other = peer.call(LIVE)
    number = peer.call(INFER, end=True, grpc_encoding="zstd")

    assert "12" == (await peer.status(number))[0]
    peer.say(other, b"")
    assert ("0", "") == await peer.status(other)
    assert number not in peer.reset


async def test_an_encoding_that_is_not_known_is_refused_and_those_that_are_named(peer: Peer) -> None:
    number = peer.call(INFER, grpc_encoding="zstd")
    peer.say(number, b"")

    code, text = await peer.status(number)
    assert (code, "zstd" in text) == ("12", True)
    assert peer.headers[number]["grpc-accept-encoding"] == "identity,deflate,gzip"


async def test_an_encoding_that_is_not_known_is_named_by_its_begin(peer: Peer) -> None:
    """To write a long header takes 100 ms, in which nobody else is served."""
    code, text = await peer.status(peer.call(INFER, grpc_encoding="z" * 10_000))

    assert ("12", f"Compression algorithm '{'z' * 64}' is not supported") == (code, text)


async def test_a_call_ends_when_its_caller_waits_no_longer(peer: Peer, twin: Any) -> None:
    twin.respond = twin.hold
    number = peer.call(INFER, grpc_timeout="50m")
    peer.say(number, sized(4))

    assert await peer.status(number) == ("4", "Deadline Exceeded")
    # None, if the deadline was over before the call was read.
    while not all(future.cancelled() for future in twin.futures):
        await asyncio.sleep(0)


async def test_a_call_that_its_client_resets_is_cancelled_alone(peer: Peer, twin: Any) -> None:
    twin.respond = twin.hold
    left, kept = peer.call(INFER), peer.call(INFER)
    for count, number in enumerate((left, kept), 1):
        peer.say(number, sized(4, number))
        await twin.wait_for_calls(count)

    peer.h2.reset_stream(left, ErrorCodes.CANCEL)
    peer.flush()
    await asyncio.wait([twin.futures[0]], timeout=SOON_S)

    assert twin.futures[0].cancelled()
    twin.finish(1)
    assert (await peer.status(kept))[0] == "0"


async def test_a_call_that_is_answered_early_need_not_be_sent_to_its_end(peer: Peer) -> None:
    number = peer.call("/nothing/Nothing")

    assert (await peer.status(number))[0] == "12"
    await peer.until(lambda: number in peer.reset)
    assert peer.reset[number] == ErrorCodes.NO_ERROR
    assert await is_served(peer)


# -- flow -------------------------------------------------------------------------------------------------------------


async def test_an_answer_waits_for_its_client_and_others_pass_it(peer: Peer) -> None:
    """Of a call's window, and of a frame's size: the large answer comes in parts, and whole."""
    peer.credits = False
    peer.h2.increment_flow_control_window(1 << 20)
    large, size = peer.call(INFER), 200_000
    for begin in range(0, len(whole := prefix(sized(size))), 16_000):
        peer.h2.send_data(large, whole[begin : begin + 16_000], end_stream=begin + 16_000 >= len(whole))
        peer.flush()
        await peer.until(lambda: peer.h2.local_flow_control_window(large) >= 16_000)
    await peer.until(lambda: len(peer.data.get(large, b"")) == 65_535)

    assert await is_served(peer)
    assert len(peer.data[large]) == 65_535
    peer.h2.increment_flow_control_window(1 << 20, large)
    peer.flush()

    assert (await peer.status(large))[0] == "0"
    answer = pb.ModelInferResponse.FromString(peer.data[large][5:])
    assert answer.raw_output_contents[0] == bytes(size)


async def test_an_answer_that_is_sent_at_once_takes_many_turns_of_the_loop(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far its client opens the windows: otherwise nobody else is served meanwhile."""
    turns, sent = LoopTurns(), list[int]()
    send_data = Http2.send_data

    def noted(self: Http2, number: int, data: Any) -> None:
        sent.append(turns.number)
        send_data(self, number, data)

    monkeypatch.setattr(Http2, "send_data", noted)
    monkeypatch.setattr("gateway.grpc.wire.sending.TURN_S", -1.0)
    peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
    peer.h2.increment_flow_control_window(1 << 20)
    await peer.until(lambda: peer.h2.outbound_flow_control_window > 1 << 20)
    number = peer.call(INFER)
    await peer.until(lambda: peer.h2.local_flow_control_window(number) == WINDOW_BYTES)
    for begin in range(0, len(whole := prefix(sized(200_000))), 16_000):
        peer.h2.send_data(number, whole[begin : begin + 16_000], end_stream=begin + 16_000 >= len(whole))
    peer.flush()
    assert ("0", "") == await peer.status(number)

    # Two turns, one after the other, may be counted as one.
    assert len(set(sent)) >= len(sent) // 2 >= 6


def prefix(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4) + message


async def test_no_more_than_a_window_is_received_of_a_stream_that_is_not_read(peer: Peer, twin: Any) -> None:
    twin.respond = twin.hold
    number, message = peer.call(STREAM), prefix(sized(10_000))
    await peer.until(lambda: peer.h2.local_flow_control_window(number) == WINDOW_BYTES)
    sent = 0
    while peer.h2.local_flow_control_window(number) >= len(message):
        peer.h2.send_data(number, message)
        peer.flush()
        sent += 1
        await asyncio.sleep(0)
    await twin.wait_for_calls(8)

    assert sent * len(message) <= WINDOW_BYTES + (8 + 1) * len(message)
    for answered in range(sent):
        await twin.wait_for_calls(min(sent, answered + 8))
        twin.finish(answered)
    await peer.until(lambda: peer.data.get(number, b"").count(b"OUTPUT0") == sent)


async def test_a_client_that_reads_nothing_is_not_read_either(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the answers to its pings would pile up."""
    monkeypatch.setattr("gateway.grpc.wire.frame_allowance.FRAMES", 1 << 30)
    pings = 1000 * PingFrame(0, opaque_data=b"12345678").serialize()
    loop = asyncio.get_running_loop()
    async with serving(grpc_http2_max_ping_strikes=0) as server, peer_of(server.port) as peer:
        with socket.create_connection(("127.0.0.1", server.port)) as deaf:
            deaf.setblocking(False)
            await loop.sock_sendall(deaf, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < PINGS_MAX_BYTES:
                    async with asyncio.timeout(2):
                        await loop.sock_sendall(deaf, pings)
                    sent += len(pings)

            assert sent < PINGS_MAX_BYTES
            assert await is_served(peer)


async def test_a_connection_receives_without_end(serving: Serving, monkeypatch: pytest.MonkeyPatch, twin: Any) -> None:
    """Its window opens again for all that has come, also of calls that are over."""
    monkeypatch.setattr("gateway.grpc.wire.connection.CONNECTION_WINDOW_BYTES", 200_000)
    twin.fail(RequestError("no"))
    async with serving() as server, peer_of(server.port) as peer:
        for _ in range(100):
            number = peer.call(INFER)
            await peer.until(lambda: peer.h2.outbound_flow_control_window > 20_000)
            peer.say(number, sized(10_000))

            assert (await peer.status(number))[0] == "3"


# -- floods -----------------------------------------------------------------------------------------------------------


async def test_calls_that_are_reset_at_once_keep_nobody_out_and_leave_nothing(serving: Serving, twin: Any) -> None:
    """The rapid reset of CVE-2023-44487. The client is told off, and comes again."""
    async with serving() as server, peer_of(server.port) as other:
        for _ in range(4):
            async with peer_of(server.port) as flooding:
                for _ in range(FLOOD // 4):
                    number = flooding.call(INFER)
                    flooding.h2.reset_stream(number, ErrorCodes.CANCEL)
                flooding.flush()
                assert await is_served(other)
                await flooding.until(lambda peer=flooding: peer.closed)
            assert [ErrorCodes.ENHANCE_YOUR_CALM] == [code for _, code, _ in flooding.h2.goaways]
        assert twin.calls == []
        await other.until(lambda: server.limit.open == 0)


async def test_a_call_counts_while_a_thread_is_at_work_for_it_though_its_client_has_left(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ends the thread: clients that leave at once would have any number of them."""
    begun, goes_on = threading.Event(), threading.Event()

    def packed(message: bytes, encoding: str) -> bytes:
        if encoding == "gzip":
            begun.set()
            assert goes_on.wait(SOON_S)
        return prefixed(message, encoding)

    monkeypatch.setattr("gateway.grpc.wire.rpc.prefixed", packed)
    monkeypatch.setattr("gateway.grpc.wire.rpc.PACKED_HERE_BYTES", 100)
    async with serving(grpc_infer_response_compression_level="low") as server, peer_of(server.port) as peer:
        left = peer.call(INFER, grpc_accept_encoding="gzip")
        peer.say(left, sized(1000))
        assert await asyncio.to_thread(begun.wait, SOON_S)
        peer.h2.reset_stream(left, ErrorCodes.CANCEL)
        peer.flush()
        # In this order: when this one is served, the server has heard that the other one is given up.
        assert await is_served(peer)
        try:
            assert (0, 1) == (len(server._connections()[0].rpcs), server.limit.open)
        finally:
            goes_on.set()
        async with asyncio.timeout(SOON_S):
            while server.limit.open:
                await asyncio.sleep(0)


async def test_a_client_that_pings_without_end_is_told_to_calm_down(serving: Serving) -> None:
    async with serving() as server, peer_of(server.port) as peer:
        for _ in range(10):
            peer.h2.ping(b"12345678")
        peer.flush()
        await peer.until(lambda: peer.closed)

    assert peer.h2.goaways == [(0, ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_pings")]


async def test_calls_of_a_client_that_breaks_the_protocol_are_cancelled_at_once(
    peer: Peer, twin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.grpc.wire.connection.LINGER_S", 1e9)
    twin.respond = twin.hold
    peer.say(peer.call(INFER), sized(4))
    await twin.wait_for_calls(1)
    peer.writer.write(bytes((0, 0, 0, 0, 0, 0, 0, 0, 0)))
    await asyncio.wait(twin.futures, timeout=SOON_S)

    assert twin.futures[0].cancelled()
    assert "failed" not in caplog.text


async def test_windows_that_open_wake_no_call_that_cannot_send(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client makes each of its frames as dear as it likes."""
    looked = list[int]()
    window = Http2.local_flow_control_window

    def look(self: Http2, number: int) -> int:
        looked.append(number)
        return window(self, number)

    monkeypatch.setattr(Http2, "local_flow_control_window", look)
    async with serving() as server, peer_of(server.port) as peer:
        peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        for _ in range(200):
            peer.say(peer.call(LIVE), b"")
        await peer.until(lambda: len(peer.headers) == 200)
        for _ in range(200):
            peer.h2.increment_flow_control_window(1)
        peer.h2.increment_flow_control_window(1000, 1)
        peer.flush()
        await peer.status(1)

        assert len(looked) < 10 * 200


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)) + bytes((0, 0, 0, 0, 0, 0, 0, 0, 9)),
    ],
    ids=["http/1.1", "garbage", "data before a call"],
)
async def test_what_is_no_http_2_loses_its_connection_alone(rpc_server: GrpcServer, peer: Peer, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rpc_server.port)
    writer.write(sent)
    async with asyncio.timeout(SOON_S):
        while await reader.read(1000):
            pass
    writer.close()

    assert await is_served(peer)


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        pytest.param(bytes((255, 255, 255, 0, 0, 0, 0, 0, 1)), bytes(16_000), id="one large frame"),
        pytest.param(  # CVE-2024-27316
            HeadersFrame(1, data=bytes(10)).serialize(),
            ContinuationFrame(1, data=bytes(16_000)).serialize(),
            id="headers without end",
        ),
    ],
)
async def test_what_is_never_whole_loses_its_connection_before_it_fills_the_memory(
    rpc_server: GrpcServer, peer: Peer, begin: bytes, part: bytes
) -> None:
    sent = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", rpc_server.port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    writer.write(begin)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(SOON_S):
            while not reader.at_eof():
                writer.write(part)
                sent += len(part)
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1 << 16), 0.01)
    writer.close()

    assert sent < UNFINISHED_BYTES_MAX
    assert await is_served(peer)


async def test_headers_that_are_too_large_lose_their_call_alone(peer: Peer) -> None:
    number = peer.call(LIVE, [("seqmesh-tenant", "x" * 1000)] * 20)

    code, text = await peer.status(number)
    assert ("8", True) == (code, "of at most 16384" in text)
    assert await is_served(peer)


async def test_headers_that_fill_the_memory_lose_their_connection_alone(rpc_server: GrpcServer, peer: Peer) -> None:
    async with peer_of(rpc_server.port) as other:
        # One header, which is sent once and then named by a byte.
        other.call(LIVE, [("seqmesh-tenant", "x" * 1000)] * 300)
        await other.until(lambda: other.closed)

        assert [ErrorCodes.ENHANCE_YOUR_CALM] == [code for _, code, _ in other.h2.goaways]
    assert await is_served(peer)


def test_a_client_cannot_make_the_table_of_headers_large() -> None:
    client, server = Peer().h2, Http2()
    client.initiate_connection()
    server.initiate_connection()
    client.update_settings({SettingCodes.HEADER_TABLE_SIZE: (1 << 32) - 1})
    server.receive_data(client.data_to_send())

    assert 4096 == server.encoder.header_table_size


def test_settings_that_nobody_knows_are_not_kept() -> None:
    """There are 65,536 of them, and h2 would look at each with every further frame of settings."""
    server = Http2()
    server.initiate_connection()
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for settings in (dict.fromkeys(range(9, 2000), 1), {SettingCodes.MAX_FRAME_SIZE: 20_000, 0xFFFF: 1}):
        body = b"".join(struct.pack(">HI", *setting) for setting in settings.items())
        server.receive_data(preface + len(body).to_bytes(3) + bytes((4, 0, 0, 0, 0, 0)) + body)
        preface = b""

    assert set(SettingCodes) >= set(server.remote_settings)
    assert 20_000 == server.max_outbound_frame_size


async def test_a_client_that_has_left_before_it_was_accepted_is_no_failure(rpc_server: GrpcServer, peer: Peer) -> None:
    failed = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", rpc_server.port)) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    assert await is_served(peer)
    assert failed == []


def test_the_protocol_forgets_calls_that_have_ended() -> None:
    """And looks for them not at each call, or many open calls would make each further one dear."""
    client, server = Peer().h2, Http2()
    client.initiate_connection()
    server.initiate_connection()
    for _ in range(1000):
        number = client.get_next_available_stream_id()
        headers = [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
        client.send_headers(number, headers, end_stream=True)
        server.receive_data(client.data_to_send())
        server.send_headers(number, [(b":status", b"200")], end_stream=True)
        client.receive_data(server.data_to_send())

    assert len(server.streams) <= SWEEP_AT_LEAST


async def test_nothing_of_a_call_stays_however_it_ends(rpc_server: GrpcServer, peer: Peer, twin: Any) -> None:
    """Not even in a cycle that waits for the collector."""
    async with nothing_stays(Rpc):
        for path in (INFER, STREAM):
            peer.say(peer.call(path), sized(4))
            peer.say(peer.call(path), b"\xff\xff")
            peer.h2.send_data(peer.call(path), b"\x07\x00\x00\x00\x00", end_stream=True)
            peer.call(path, end=True)
            peer.call(path, grpc_timeout="1n")
            peer.call(path, grpc_encoding="zstd")
            reset = peer.call(path)
            peer.h2.send_data(reset, prefix(sized(100))[:50])
            peer.h2.reset_stream(reset)
            peer.flush()
            given_up = peer.call(path)
            peer.h2.send_data(given_up, prefix(sized(100_000))[:16_000])
            peer.h2.send_data(given_up, bytes(4_000))
            peer.flush()
            async with asyncio.timeout(SOON_S):
                while not rpc_server.relieve(1):
                    await asyncio.sleep(0.01)
        await peer.until(lambda: rpc_server.limit.open == 0)
        twin.calls.clear()
        twin.futures.clear()


@pytest.mark.parametrize("tls", [False, True])
async def test_nothing_of_a_connection_stays_when_it_is_over(serving: Serving, tls: bool) -> None:
    """Connections in cycles were hundreds of MB, and everybody waited while the collector looked through them."""
    async with serving(**(SECURE if tls else {})) as server:
        context = ssl.create_default_context(cafile=str(TLS / "ca.pem")) if tls else None
        async with nothing_stays(GrpcConnection, Http2), asyncio.timeout(SOON_S):
            for begin in (b"", b"PRI", b"no preface"):
                reader, writer = await asyncio.open_connection("localhost", server.port, ssl=context)
                writer.write(begin)
                await reader.read(1)
                writer.close()
            if not tls:
                async with peer_of(server.port) as peer:
                    assert await is_served(peer)


async def test_a_client_that_does_not_come_to_the_end_of_its_handshake_has_no_connection_yet(serving: Serving) -> None:
    async with serving(**SECURE) as server, nothing_stays(Http2):
        reader, writer = await asyncio.open_connection("localhost", server.port)
        writer.write(b"no handshake")
        assert b"" == await reader.read()
        writer.close()


# -- ends -------------------------------------------------------------------------------------------------------------


async def test_a_connection_ends_at_its_age(serving: Serving, twin: Any) -> None:
    """Its client is told, and what it has asked before is answered."""
    twin.respond = twin.hold
    async with serving(grpc_max_connection_age=100) as server, peer_of(server.port) as peer:
        number = peer.call(INFER)
        peer.say(number, sized(4))
        await twin.wait_for_calls(1)
        await peer.until(lambda: len(peer.h2.goaways) == 2)
        late = peer.call(LIVE)
        await peer.until(lambda: late in peer.reset)
        twin.finish(0)

        assert (await peer.status(number))[0] == "0"
        await peer.until(lambda: peer.closed)

    assert peer.reset[late] == ErrorCodes.REFUSED_STREAM, "which clients repeat elsewhere"
    assert peer.h2.goaways == [(NEWEST, 0, b""), (number, 0, b"")]


@pytest.mark.parametrize("tls", [False, True])
async def test_a_connection_that_ends_waits_while_its_client_takes_the_last_answer(
    serving: Serving, twin: Any, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """And sends frames meanwhile. Who takes nothing more is cut off."""
    monkeypatch.setattr("gateway.ports.serving.CHECK_S", 1e9)

    def answer(_: object) -> Answer:
        output = Tensor("OUTPUT", "UINT8", (ANSWER_BYTES,), bytes(ANSWER_BYTES))
        return Answer(ReplyMessage("1", (output,)), RECORD, "1", "", None)

    twin.respond = answer
    async with serving(**(SECURE if tls else {})) as server:
        loop, client = asyncio.get_running_loop(), Peer()
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PART_BYTES // 8)
        plain.connect(("127.0.0.1", server.port))
        context = ssl.create_default_context(cafile=str(TLS / "ca.pem")) if tls else None
        name = "localhost" if tls else None
        reader, client.writer = await asyncio.open_connection(
            sock=plain, ssl=context, server_hostname=name, limit=PART_BYTES // 8
        )
        client.h2.initiate_connection()
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
        client.h2.increment_flow_control_window(1 << 30)
        client.say(client.call(INFER), sized(4))
        await twin.wait_for_calls(1)
        (connection,) = server._connections()
        while server.limit.open:
            await asyncio.sleep(0.01)
        connection.see_off()
        for part in range(ANSWER_BYTES // PART_BYTES):
            await reader.readexactly(PART_BYTES)
            client.h2.increment_flow_control_window(1)
            client.flush()
            connection.check(loop.time() + 10 * part, None)
        for late_s in (1000, 2000, 3000):
            connection.check(loop.time() + late_s, None)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(SOON_S):
                await reader.read()
        client.writer.close()


async def test_the_calls_of_an_old_connection_have_a_grace(
    serving: Serving, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server looks when the test says so: else its clock may be past the grace before the call has come.
    monkeypatch.setattr("gateway.ports.serving.CHECK_S", 1e9)
    twin.respond = twin.hold
    settings = {"grpc_max_connection_age": 1_000_000, "grpc_max_connection_age_grace": 1_000_000}
    async with serving(**settings) as server, peer_of(server.port) as peer:
        peer.say(peer.call(INFER), sized(4))
        await twin.wait_for_calls(1)
        (connection,), begin = server._connections(), asyncio.get_running_loop().time()
        connection.check(begin + 1_500, None)
        await peer.until(lambda: bool(peer.h2.goaways))
        assert not twin.futures[0].done()

        connection.check(begin + 2_500, None)
        await peer.until(lambda: peer.closed)
        await asyncio.wait(twin.futures, timeout=SOON_S)

        assert twin.futures[0].cancelled()


async def test_an_idle_connection_ends(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.grpc.server.IDLE_S", 0.2)
    async with serving() as server, peer_of(server.port) as peer:
        assert await is_served(peer)
        await peer.until(lambda: peer.closed)

    assert [last for last, _, _ in peer.h2.goaways] == [NEWEST, 1]


async def test_a_connection_that_does_not_begin_ends(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.grpc.server.FIRST_S", 0.1)
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(SOON_S):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
        writer.close()


async def test_a_quiet_connection_is_pinged_and_a_dead_one_loses_its_calls(
    serving: Serving, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server looks when the test says so: else the client that lives may be late with its answer, too.
    monkeypatch.setattr("gateway.ports.serving.CHECK_S", 1e9)
    twin.respond = twin.hold
    settings = {"grpc_keepalive_time": 1_000_000, "grpc_keepalive_timeout": 1_000_000}
    async with serving(**settings) as server, peer_of(server.port) as alive, peer_of(server.port) as dead:
        alive.say(alive.call(INFER), sized(4))
        await twin.wait_for_calls(1)
        dead.say(dead.call(INFER), sized(4))
        await twin.wait_for_calls(2)
        dead.writer.transport.pause_reading()  # type: ignore[attr-defined]
        # Behind what the dead one has still sent, which would pass for its answer.
        assert await is_served(alive)
        connections, begin = server._connections(), asyncio.get_running_loop().time()
        for connection in connections:
            connection.check(begin + 1_500, None)
        async with asyncio.timeout(SOON_S):
            while connections[0]._pings.is_dead(math.inf):
                await asyncio.sleep(0)
        for connection in connections:
            connection.check(begin + 3_000, None)
        await asyncio.wait([twin.futures[1]], timeout=SOON_S)

        assert [False, True] == [future.cancelled() for future in twin.futures]
        twin.finish(0)


async def test_a_client_that_takes_its_leave_gets_what_it_has_asked_for(peer: Peer, twin: Any) -> None:
    twin.respond = twin.hold
    number = peer.call(INFER)
    peer.say(number, sized(4))
    await twin.wait_for_calls(1)
    peer.writer.write(GoAwayFrame(0, last_stream_id=0).serialize())
    await peer.until(lambda: bool(peer.h2.goaways))
    twin.finish(0)

    assert (await peer.status(number))[0] == "0"
    await peer.until(lambda: peer.closed)


async def test_a_full_port_gives_up_the_connection_that_was_idle_for_longest(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, twin: Any
) -> None:
    monkeypatch.setattr("gateway.ports.seats.SETTLED_S", 0.0)
    twin.respond = twin.hold
    async with serving(connections_max=2) as server, peer_of(server.port) as busy, peer_of(server.port) as idle:
        number = busy.call(INFER)
        busy.say(number, sized(4))
        assert await is_served(idle)
        await twin.wait_for_calls(1)

        async with peer_of(server.port) as new:
            assert await is_served(new)
        await idle.until(lambda: idle.closed)
        twin.finish(0)

        assert (await busy.status(number))[0] == "0"
    assert idle.h2.goaways == [(1, 0, b"")]


@pytest.mark.parametrize("moment", ["message on its way", "model runs", "answer waits for its window", "idle"])
async def test_a_stop_at_any_moment_leaves_nothing_and_a_second_one_changes_nothing(
    serving: Serving, twin: Any, moment: str
) -> None:
    twin.respond = twin.hold if moment == "model runs" else twin.answer
    async with serving() as server, peer_of(server.port) as peer:
        peer.credits = False
        if moment == "message on its way":
            peer.h2.send_data(peer.call(INFER), prefix(sized(10_000))[:5_000])
        elif moment == "answer waits for its window":
            await peer.until(lambda: peer.h2.outbound_flow_control_window > 1 << 20)
            for _ in range(3):
                peer.say(peer.call(STREAM), sized(15_000))
                peer.say(peer.call(INFER), sized(15_000))
            await peer.until(lambda: sum(map(len, peer.data.values())) == 65_535)
        elif moment == "model runs":
            for path in (INFER, STREAM):
                peer.say(peer.call(path), sized(4))
            await twin.wait_for_calls(2)
        else:
            assert await is_served(peer)
        peer.flush()
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(server.stop(0.1, see_off_s=0.0), server.stop(0.1, see_off_s=0.0))
            await server.stop(0)

        assert server.limit.open == 0
        assert list(server._connections()) == []
        assert all(future.done() for future in twin.futures)
        await peer.until(lambda: peer.closed)


def test_only_a_few_calls_of_health_are_served_beyond_the_bound() -> None:
    limit = RpcLimit(most=1)
    asked = [LIVE] * (1 + SPARE) + [INFER, LIVE]

    assert [True] * (1 + SPARE) + [False, False] == [limit.begin("a", path) for path in asked]
    assert 2 == limit.refused


def test_one_client_leaves_some_calls_to_the_others() -> None:
    limit = RpcLimit(most=16)

    assert [True] * 14 + [False] * 3 == [limit.begin("greedy", INFER) for _ in range(17)]
    for _ in range(3):
        limit.end("greedy")
    assert [True, True, False] == [limit.begin("other", INFER) for _ in range(3)]
    for client in ["other"] * 3 + ["greedy"] * 14:
        limit.end(client)
    assert 0 == limit.open
    assert not limit._shares._of


def test_two_clients_leave_some_calls_to_the_others() -> None:
    limit = RpcLimit(most=128)

    def all_it_gets(client: str) -> int:
        calls = 0
        while limit.begin(client, INFER):
            calls += 1
        limit.end(client)
        return calls

    assert [112, 14, 2] == [all_it_gets(client) for client in ("greedy", "eager", "other")]
