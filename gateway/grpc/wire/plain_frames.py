"""Frames as nearly all of them are, read and written without h2's ceremony.

Of DATA or WINDOW_UPDATE on an open stream nothing follows but that windows move, and that bytes have come. h2 makes
some objects for it and asks two state machines: 4 to 6 us, and 30 for the headers of an answer, where this takes 0.5 to
3. In a process that does other things in between it is twice as much. What is out of the ordinary in any way is left to
h2, which judges it.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, cast

from h2.connection import ConnectionState, H2Connection
from h2.events import DataReceived, Event, WindowUpdated
from h2.stream import H2Stream, StreamInputs, StreamState

from gateway.grpc.wire.opening import ENTRY_BYTES, Headers

HEAD = Struct(">HBBBL")
"""A frame begins with two bytes and one of its size, its kind, its flags, its stream."""
DATA, HEADERS, WINDOW_UPDATE = 0, 1, 8
NO_FLAGS, END_STREAM, END_HEADERS = 0, 1, 4
INCREMENT_BYTES = 4
WINDOW_MAX = (1 << 31) - 1
HEADERS_BYTES_MAX = 2 << 10
"""Of headers that are plain. Written, they fit into one frame of any client, even at 30 bits a byte (RFC 7541)."""
SENDS = frozenset({StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE})


class PlainFrames(H2Connection):
    """A server's side of a connection, which does without h2 what is plain."""

    def read_plain(self) -> list[Event] | None:
        """Takes the next frame out of the buffer and returns what it says, if it is a plain one."""
        buffer = cast("Any", self.incoming_buffer)
        data: bytearray = buffer._data  # noqa: SLF001
        if (
            len(data) < HEAD.size
            or buffer._headers_buffer  # noqa: SLF001
            or self.state_machine.state is not ConnectionState.SERVER_OPEN
        ):
            return None
        high, low, kind, flags, number = HEAD.unpack_from(data)
        size: int = high << 8 | low
        end = HEAD.size + size
        if len(data) < end or size > buffer.max_frame_size:
            return None
        if kind == DATA and flags in (NO_FLAGS, END_STREAM):
            events = self._data(number, size, data, has_ended=flags == END_STREAM)
        elif kind == WINDOW_UPDATE and size == INCREMENT_BYTES:
            events = self._window(number, int.from_bytes(data[HEAD.size : end]))
        else:
            events = None
        if events is not None:
            del data[:end]
        return events

    def _data(self, number: int, size: int, data: bytearray, *, has_ended: bool) -> list[Event] | None:
        stream = self.streams.get(number)
        if stream is None or stream.state_machine.state is not StreamState.OPEN:
            return None
        window = cast("Any", stream)._inbound_window_manager  # noqa: SLF001
        mine = self._inbound_flow_control_window_manager
        if size > window.current_window_size or size > mine.current_window_size:
            return None
        window.current_window_size -= size
        mine.current_window_size -= size
        part = bytes(data[HEAD.size : HEAD.size + size])
        events: list[Event] = [DataReceived(stream_id=number, data=part, flow_controlled_length=size)]
        if has_ended:
            events += stream.state_machine.process_input(StreamInputs.RECV_END_STREAM)
        return events

    def _window(self, number: int, more: int) -> list[Event] | None:
        owner = self._sending(number) if number else self
        if owner is None or not 0 < more <= WINDOW_MAX or owner.outbound_flow_control_window + more > WINDOW_MAX:
            return None
        owner.outbound_flow_control_window += more
        return [WindowUpdated(stream_id=number, delta=more)]

    def send_plain(self, number: int, data: bytes) -> bool:
        """Sends bytes of a stream in one frame. False: a window or frames are too small for it, or h2 must judge it."""
        stream, size = self._sending(number), len(data)
        if (
            stream is None
            or size > self.max_outbound_frame_size
            or size > self.outbound_flow_control_window
            or size > stream.outbound_flow_control_window
        ):
            return False
        self.outbound_flow_control_window -= size
        stream.outbound_flow_control_window -= size
        self._put(DATA, NO_FLAGS, number, data)
        return True

    def send_plain_headers(self, number: int, headers: Headers, *, end_stream: bool) -> bool:
        """Sends the headers before an answer's first message, or behind its last. False: h2 must judge it."""
        stream = self._sending(number)
        if (
            stream is None
            or (stream.state_machine.headers_sent and not end_stream)
            or sum([len(name) + len(value) + ENTRY_BYTES for name, value in headers]) > HEADERS_BYTES_MAX
        ):
            return False
        stream.state_machine.process_input(StreamInputs.SEND_HEADERS)
        if end_stream:
            stream.state_machine.process_input(StreamInputs.SEND_END_STREAM)
        flags = END_HEADERS | END_STREAM if end_stream else END_HEADERS
        self._put(HEADERS, flags, number, self.encoder.encode(headers))
        return True

    def _sending(self, number: int) -> H2Stream | None:
        """The stream, if it may be sent on."""
        stream = self.streams.get(number)
        return stream if stream is not None and stream.state_machine.state in SENDS else None

    def _put(self, kind: int, flags: int, number: int, body: bytes) -> None:
        size = len(body)
        self._data_to_send += HEAD.pack(size >> 8, size & 0xFF, kind, flags, number) + body
