"""A connection with a client that does anything: legal or not, in any pieces, at any moment.

Each seed is one client. It opens calls, sends their messages in pieces, resets them, opens and shuts windows, and may
end by sending what is no HTTP/2; the transport is full now and then; what serves the calls answers, fails, or is
cancelled. More seeds: SEEDS=5000 pytest tests/gateway/grpc/wire/test_any_client.py
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any, cast

import pytest
from h2.events import DataReceived, ResponseReceived, SettingsAcknowledged, StreamEnded, StreamReset, TrailersReceived
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from gateway.grpc.wire.connection import GrpcConnection
from gateway.grpc.wire.pings import PingRules
from gateway.grpc.wire.rpc import Rpc
from gateway.grpc.wire.rules import ConnectionRules, RpcLimit
from gateway.ports.seats import Share
from gateway.ports.turns import LoopTurns
from shared.contract.errors import MeshError
from tests.gateway.grpc.wire.peer import LIVE, ClientSide

SEEDS = int(os.environ.get("SEEDS", "60"))
DEEDS = 150
"""Of one client."""
CALLS_MAX = 12
MESSAGE_BYTES_MAX = 700_000
SIZES = (0, 1, 5, 300, 20_000, 70_000, 400_000)
FULL_BYTES = 30_000
"""Unsent bytes with which the transport is full."""
RULES = ConnectionRules(PingRules(1e9, 1e9, True, 0, 0.0, 0), MESSAGE_BYTES_MAX, idle_s=1e9)
STEPS_S = (0.0, 0.0, 0.0, 0.0005, 0.003)
"""By so much time goes on whenever somebody looks at the clock."""
QUIET, ROUNDS_MAX = 5, 20_000
"""LoopTurns of the loop without anything to do, with which a client has ended; and turns after which one hangs."""
FRAMES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 77)


class Loop(asyncio.SelectorEventLoop):
    """A loop whose clock runs by chance: turns of it end at any frame."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._now = 0.0
        super().__init__()

    def time(self) -> float:
        self._now += self._chance.choice(STEPS_S)
        return self._now


class Transport(asyncio.Transport):
    """Keeps what is written until it is taken. Strict about what must not be asked of it: as uvloop's, it takes nothing
    from the moment in which the connection is told that it is lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = bytearray()
        self.reads = True
        self.is_full = self.is_over = self.is_lost = self.has_ended = False
        self.protocol: Any = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def write(self, data: Any) -> None:
        assert not self.has_ended, "written behind the end"
        assert not self.is_lost, "written to nobody"
        if not self.is_over:
            self.kept += data
            if len(self.kept) > FULL_BYTES and not self.is_full:
                self.is_full = True
                self.protocol.pause_writing()

    def take(self, size: int) -> bytes:
        taken = bytes(self.kept[:size])
        del self.kept[:size]
        if self.is_full and len(self.kept) < FULL_BYTES // 4 and not self.is_over:
            self.is_full = False
            self.protocol.resume_writing()
        return taken

    def get_write_buffer_size(self) -> int:
        return len(self.kept)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def abort(self) -> None:
        if not self.is_over:
            self.is_over = True
            asyncio.get_running_loop().call_soon(self.lose)

    def lose(self) -> None:
        self.is_lost = True
        self.protocol.connection_lost(None)


class AnyClient:
    """A client, and what serves it.

    said     of each call: the messages that its server was done writing, and its status (None: not served to its end)
    heard    of each call: the bytes and the status that the client got
    left     calls that the client has reset, or that may have ended early
    is_legal the client has kept to the protocol
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.h2 = ClientSide()
        self.h2.initiate_connection()
        self.h2.max_inbound_frame_size = self.chance.choice((16_384, 100_000))
        self.transport = Transport()
        self.limit = RpcLimit(CALLS_MAX)
        share = Share(1, 1)
        seat = share.take("x", 0.0, 1e9)
        assert seat is not None
        self.connection = GrpcConnection(self.serve, seat, RULES, self.limit, LoopTurns())
        self.transport.protocol = self.connection
        self.said: dict[int, tuple[list[bytes], int | None]] = {}
        self.heard: dict[int, tuple[bytearray, list[int]]] = {}
        self.to_send: dict[int, bytearray] = {}
        self.uncredited: dict[int, int] = {}
        self.left = set[int]()
        self.is_legal = True
        self.sending = bytearray()
        self.rpcs = list[Rpc]()
        self.is_patient = self.is_heard = False

    # -- the server -------------------------------------------------------------------------------------------------

    async def serve(self, rpc: Rpc) -> None:
        """Reads, writes, ends: by chance early, late, or by an error."""
        chance, written = self.chance, list[bytes]()
        self.rpcs.append(rpc)
        self.said[rpc.number] = written, None
        if chance.random() < 0.3:
            rpc.compress("gzip")
        try:
            while (message := await rpc.read(is_awaited=chance.random() < 0.5)) is not None:
                for _ in range(chance.choice((0, 1, 1, 1, 2))):
                    await rpc.write(message)
                    written.append(bytes(message))
                for _ in range(chance.choice((0, 0, 1, 5))):
                    await asyncio.sleep(0)
                if chance.random() < 0.05:
                    break
            if chance.random() < 0.05:
                raise ZeroDivisionError
            code = chance.choice((0, 0, 0, 5))
        except MeshError:
            code = 8
        self.said[rpc.number] = written, code
        rpc.end(code, "text" if code else "")

    # -- the client -------------------------------------------------------------------------------------------------

    def call(self) -> None:
        number = self.h2.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", LIVE), (":authority", "x"), ("te", "trailers")]
        headers.append(("content-type", self.chance.choice(("application/grpc",) * 9 + ("text/html",))))
        if self.chance.random() < 0.2:
            headers.append(("grpc-timeout", self.chance.choice(("0n", "1m", "3m", "20m"))))
        if self.chance.random() < 0.3:
            headers.append(("grpc-accept-encoding", "gzip"))
        if any(word == "text/html" or name == "grpc-timeout" for name, word in headers):
            self.left.add(number)
        is_whole = self.chance.random() < 0.1
        self.h2.send_headers(number, headers, end_stream=is_whole)
        self.heard[number] = bytearray(), []
        if is_whole:
            return
        whole = self.to_send[number] = bytearray()
        for _ in range(self.chance.choice((0, 1, 1, 1, 3, 10))):
            message = self.chance.randbytes(1) * self.chance.choice(SIZES)
            whole += struct.pack(">BI", 0, len(message)) + message

    def send(self, most: int | None = None) -> None:
        """Sends some of a call; the end with it or alone."""
        if not self.to_send:
            return
        number = self.chance.choice(list(self.to_send))
        rest = self.to_send[number]
        size = min(len(rest), self.h2.local_flow_control_window(number), 16_384, most or 16_384)
        is_end = size == len(rest) and (most is None or self.chance.random() < 0.5)
        if size or is_end:
            pad = self.chance.choice((None, None, None, 0, 7)) if size + 8 < min(self.window(number), 16_384) else None
            self.h2.send_data(number, bytes(rest[:size]), end_stream=is_end, pad_length=pad)
            del rest[:size]
        if is_end:
            del self.to_send[number]

    def window(self, number: int) -> int:
        return self.h2.local_flow_control_window(number)

    def reset(self) -> None:
        open_calls = [number for number, (_, codes) in self.heard.items() if not codes and number not in self.left]
        if open_calls:
            self.leave(self.chance.choice(open_calls))

    def leave(self, number: int) -> None:
        self.left.add(number)
        self.to_send.pop(number, None)
        self.h2.reset_stream(number, 8)

    def open_windows(self) -> None:
        for number, size in list(self.uncredited.items()):
            if self.is_patient or self.chance.random() < 0.5:
                self.h2.acknowledge_received_data(size, number)
                del self.uncredited[number]

    def change(self) -> None:
        size = self.chance.choice((0, 1, 100, 65_535, 1 << 20))
        if not self.is_heard:
            return  # h2's client would take the answer to its first settings for that to these
        self.h2.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: size,
                SettingCodes.MAX_FRAME_SIZE: self.h2.max_inbound_frame_size,
                SettingCodes.HEADER_TABLE_SIZE: self.chance.choice((0, 100, 4096, 1 << 20)),
            }
        )

    def ping(self) -> None:
        self.h2.ping(b"12345678")

    def offend(self) -> None:
        """From now on nobody need understand this client."""
        self.is_legal = False
        self.sending += self.h2.data_to_send()
        for _ in range(self.chance.randrange(1, 30)):
            content = self.chance.randbytes(self.chance.choice((0, 1, 4, 5, 6, 8, 40)))
            if self.chance.random() < 0.5:
                content = struct.pack(">I", self.chance.choice((0, 1, (1 << 31) - 1)))
            number = self.chance.choice((0, 1, 2, 3, 5, 7, 9, 1001, *self.heard))
            kind, flags = self.chance.choice(FRAMES), self.chance.choice((0, 1, 4, 5, 8, 32, 255))
            self.sending += len(content).to_bytes(3) + struct.pack(">BBI", kind, flags, number) + content

    def say_goodbye(self) -> None:
        self.sending += self.h2.data_to_send() + GoAwayFrame(0, last_stream_id=0).serialize()
        self.is_legal = False

    def hang_up(self) -> None:
        """The server hears of it in its next turn, whatever it has to say then."""
        self.is_legal = False
        self.transport.abort()

    # -- between them -----------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Some bytes reach the server."""
        if self.is_legal:
            self.sending += self.h2.data_to_send()
        size = self.chance.choice((1, 9, 100, 20_000, 200_000))
        if self.sending and self.transport.reads and not self.transport.is_over:
            data = bytes(self.sending[:size])
            del self.sending[:size]
            self.connection.data_received(data)

    def receive(self) -> None:
        """Some bytes reach the client. h2 raises for those that break the protocol, and for what passes a window."""
        data = self.transport.take(self.chance.choice((1, 50, 10_000, 100_000)))
        if not self.is_legal:
            return
        for event in self.h2.receive_data(data):
            match event:
                case DataReceived():
                    assert event.stream_id is not None
                    self.heard[event.stream_id][0].extend(event.data)
                    size = self.uncredited.get(event.stream_id, 0) + event.flow_controlled_length
                    self.uncredited[event.stream_id] = size
                case ResponseReceived() | TrailersReceived():
                    assert event.stream_id is not None
                    codes = [int(word) for name, word in event.headers if str(name) == "grpc-status"]
                    self.heard[event.stream_id][1].extend(codes)
                case SettingsAcknowledged():
                    self.is_heard = True
                case StreamEnded() | StreamReset():
                    assert event.stream_id is not None
                    self.to_send.pop(event.stream_id, None)
                    if isinstance(event, StreamReset) and not self.heard[event.stream_id][1]:
                        self.left.add(event.stream_id)
                case _:
                    pass

    def cancel(self) -> None:
        if self.rpcs:
            rpc = self.chance.choice(self.rpcs)
            if rpc.task is not None and not rpc.task.done():
                self.left.add(rpc.number)
                rpc.task.cancel()

    def fail(self) -> None:
        if self.connection.rpcs:
            rpc = self.chance.choice(list(self.connection.rpcs.values()))
            self.left.add(rpc.number)
            rpc.give_up()

    def see_off(self) -> None:
        self.connection.leave()
        self.connection.see_off()

    async def live(self) -> None:
        deeds: list[Callable[[], object]] = []
        often = {self.call: 8, self.send: 30, self.deliver: 30, self.receive: 30, self.open_windows: 8}
        seldom = {self.reset: 2, self.change: 2, self.ping: 2, self.cancel: 1}
        for deed, weight in (often | seldom).items():
            deeds += [deed] * weight
        self.connection.connection_made(self.transport)
        running = asyncio.get_running_loop().create_task(self.connection.run(self.transport))
        for _ in range(DEEDS):
            if self.transport.has_ended or self.transport.is_over:
                break
            deed = self.chance.choice(deeds)
            if self.is_legal or deed in (self.deliver, self.receive, self.cancel):
                deed()
            if self.is_legal and self.chance.random() < 0.005:
                self.hang_up()
            if self.is_legal and self.chance.random() < 0.003:
                self.chance.choice((self.offend, self.say_goodbye, self.fail))()
            if self.chance.random() < 0.4:
                await asyncio.sleep(0)
        if self.is_legal:
            await self.end_well()
        self.chance.choice((self.see_off, self.connection.crowd_out, bool))()
        self.connection.check(self.connection.loop.time(), None)
        self.transport.abort()
        await running

    async def end_well(self) -> None:
        """Sends and reads everything; the calls that are left open by chance are reset."""
        self.is_patient = True
        rounds = quiet = 0
        while quiet < QUIET and rounds < ROUNDS_MAX:
            rounds += 1
            if self.is_heard and rounds % 100 == 0:
                self.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
            self.send()
            self.deliver()
            self.receive()
            self.open_windows()
            await asyncio.sleep(0)
            is_busy = self.to_send or self.sending or self.transport.kept or self.connection.rpcs
            quiet = 0 if is_busy else quiet + 1
        assert not self.connection.rpcs, "calls of a client that sends and reads everything end"

    def check(self) -> None:
        """What holds whatever the client does; and of a legal one, that it got what was said."""
        connection = cast("Any", self.connection)
        assert (0, {}, set(), 0) == (
            self.limit.open, connection.rpcs, connection._tasks, len(connection._sending._waiting)
        )  # fmt: skip
        if not self.is_legal:
            return
        for number, (written, code) in self.said.items():
            if code is None or number in self.left:
                continue
            raw, codes = self.heard[number]
            assert [code] == codes
            assert written == list(messages(bytes(raw)))


def messages(raw: bytes) -> list[bytes]:
    found = list[bytes]()
    while raw:
        packed, size = struct.unpack(">BI", raw[:5])
        message, raw = raw[5 : 5 + size], raw[5 + size :]
        assert len(message) == size
        found.append(zlib.decompress(message, 31) if packed else message)
    return found


def run(seed: int) -> None:
    failed = list[Any]()

    async def whole() -> AnyClient:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        client = AnyClient(seed)
        await client.live()
        return client

    with asyncio.Runner(loop_factory=lambda: Loop(random.Random(seed))) as runner:
        client = runner.run(whole())
    assert failed == []
    client.check()


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_no_client_breaks_its_connection_and_a_legal_one_gets_what_is_said(first: int) -> None:
    for seed in range(first, min(first + 10, SEEDS)):
        try:
            run(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
