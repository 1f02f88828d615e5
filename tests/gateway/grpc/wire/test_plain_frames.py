"""What `plain_frames` reads and writes, beside h2: the same events, answers and windows, and the same bytes.

Each seed is a client that sends frames of any kind, legal or not, in any pieces, to a server that answers by chance. It
is played twice, the second time with h2 alone.

More seeds: SEEDS=5000 pytest tests/gateway/grpc/wire/test_plain_frames.py
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
)

from gateway.grpc.wire import http2
from gateway.grpc.wire.http2 import Broken, Http2
from gateway.grpc.wire.opening import BEGIN, trailers
from gateway.grpc.wire.plain_frames import WINDOW_MAX, PlainFrames

SEEDS = int(os.environ.get("SEEDS", "150"))
FRAMES, CALLS_MAX = 120, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
REQUEST = ((":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), ("te", "trailers"))
ODD = 0.003
"""How often a frame is none that a client of good will sends. Most of them end the connection."""
SIZES = (0, 1, 5, 150, 1_500, 9_000, 16_384)
TOO_LARGE = 16_385
"""Of a frame's data."""
INCREMENTS = (1, 500, 70_000, 1 << 20)
ODD_INCREMENTS = (WINDOW_MAX - 70_000, WINDOW_MAX, 0, 1 << 31)
LINKS = frozenset({"stream_ended", "priority_updated"})
"""Of an event to other events, which come by themselves too."""
ENDS = (trailers(0), trailers(3, "no such thing"), trailers(0, "", (("key", "value"),)))

Trace = list[Any]


class Client:
    """What one client sends."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._encoder = Encoder()
        self._last = -1
        self._is_odd = lambda: chance.random() < ODD

    def pieces(self) -> Iterator[bytes]:
        """Frames of any kind, several together or in parts."""
        data = b"".join([PREFACE, SettingsFrame(0).serialize(), *[frame.serialize() for frame in self._headers()]])
        for _ in range(FRAMES):
            data += b"".join(self._frames())
            if self._chance.random() < 0.6:
                size = len(data) if self._chance.random() < 0.7 else self._chance.randrange(len(data) + 1)
                yield data[:size]
                data = data[size:]
        yield data

    def _frames(self) -> Iterator[bytes]:
        kinds: list[Callable[[], list[Any]]] = [
            *[self._data] * 8, *[self._window] * 6, *[self._headers] * 4, self._reset, self._ping, self._settings,
        ]  # fmt: skip
        frames = self._chance.choice(kinds)()
        return (frame.serialize() if isinstance(frame, Frame) else frame for frame in frames)

    def _stream(self) -> int:
        return self._last + 2 if self._is_odd() else max(1, self._last - 2 * self._chance.randrange(CALLS_MAX))

    def _data(self) -> list[Frame]:
        frame = DataFrame(self._stream(), bytes(TOO_LARGE if self._is_odd() else self._chance.choice(SIZES)))
        if self._chance.random() < 0.1:
            frame.flags.add("END_STREAM")
        if self._chance.random() < 0.1:
            frame.flags.add("PADDED")
            frame.pad_length = self._chance.choice([0, 7])
            frame.data = frame.data[7 + 1 :]
        return [frame]

    def _window(self) -> list[Any]:
        stream = self._chance.choice([0, self._stream()])
        usual = INCREMENTS if stream else INCREMENTS[:2]
        increment = self._chance.choice(ODD_INCREMENTS if self._is_odd() else usual).to_bytes(4)
        increment = increment[1:] if self._is_odd() else increment
        return [len(increment).to_bytes(3) + b"\x08\0" + stream.to_bytes(4) + increment]

    def _headers(self) -> list[Frame]:
        self._last += 2
        more = [("seed", str(self._chance.random()))] if self._chance.random() < 0.3 else []
        block = self._encoder.encode([*REQUEST, *more])
        if self._chance.random() < 0.8:
            return [HeadersFrame(self._last, block, flags=["END_HEADERS"])]
        cut = self._chance.randrange(len(block))
        between = self._data() if self._chance.random() < 0.1 else []
        return [
            HeadersFrame(self._last, block[:cut]),
            *between,
            ContinuationFrame(self._last, block[cut:], flags=["END_HEADERS"]),
        ]

    def _reset(self) -> list[Frame]:
        return [RstStreamFrame(self._stream(), 8)]

    def _ping(self) -> list[Frame]:
        return [PingFrame(0, b"\1" * 8)]

    def _settings(self) -> list[Frame]:
        window = self._chance.choice([0, 1_000, 65_535, 1 << 20])
        return [SettingsFrame(0, {SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.MAX_FRAME_SIZE: 16_384})]


def deed(server: Http2, chance: random.Random) -> Any:
    """The server does something with one of its streams. Returns what came of it."""
    if not server.streams:
        return None
    number = chance.choice([*server.streams])
    data = bytes(chance.choice([*SIZES, TOO_LARGE]))
    acts: list[Callable[[], Any]] = [
        lambda: server.answer(number, BEGIN),
        lambda: server.answer(number, [*BEGIN, (b"grpc-encoding", b"gzip")]),
        lambda: server.answer(number, chance.choice(ENDS), end_stream=True),
        lambda: server.reset_stream(number, ErrorCodes.CANCEL),
        lambda: server.increment_flow_control_window(len(data) + 1, number),
        lambda: server.increment_flow_control_window(len(data) + 1),
        *[lambda: server.send_at_once(number, data)] * 6,
    ]
    if chance.random() < ODD:
        acts = [server.close_connection]
    try:
        return chance.choice(acts)()
    except (ProtocolError, ValueError, KeyError) as error:
        return type(error).__name__


def told(event: Event) -> Any:
    """What a connection reads of an event."""
    if isinstance(event, DataReceived):
        return "data", event.stream_id, bytes(event.data), event.flow_controlled_length
    return type(event).__name__, [str(value) for name, value in vars(event).items() if name not in LINKS]


def windows(server: Http2) -> Any:
    streams = {
        number: (stream.state_machine.state, stream.outbound_flow_control_window, stream.inbound_flow_control_window)
        for number, stream in server.streams.items()
    }
    return server.outbound_flow_control_window, server.inbound_flow_control_window, streams


def played(seed: int) -> Trace:
    server, chance, trace = Http2(), random.Random(seed), list[Any]()
    server.initiate_connection()
    server.increment_flow_control_window(chance.choice([1 << 20, 1 << 30]))
    for piece in Client(random.Random(seed)).pieces():
        for events in server.receive(piece):
            trace += [told(event) for event in events]
            if any(isinstance(event, Broken) for event in events):
                return [*trace, server.data_to_send()]
            if chance.random() < 0.5:
                trace.append(deed(server, chance))
            if chance.random() < 0.3:
                trace.append(server.data_to_send())
        trace.append(windows(server))
    return trace


@pytest.mark.parametrize("seed", range(SEEDS))
def test_plain_frames_do_what_h2_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    is_plain: list[bool] = []
    read_plain = PlainFrames.read_plain

    def counted(connection: PlainFrames) -> list[Event] | None:
        events = read_plain(connection)
        is_plain.append(events is not None)
        return events

    def never(*_args: object, **_named: object) -> None:
        return None

    monkeypatch.setattr(http2, "WINDOW_BYTES", 50_000)
    monkeypatch.setattr(PlainFrames, "read_plain", counted)
    plain = played(seed)
    for name in ("read_plain", "send_plain", "send_plain_headers"):
        monkeypatch.setattr(PlainFrames, name, never)
    assert played(seed) == plain
    assert (any(is_plain) or len(is_plain) < FRAMES // 2) and not all(is_plain)
