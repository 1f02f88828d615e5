"""The protocol of a connection: h2's state machine, which reads and writes bytes and frames, but has no transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from h2.config import H2Configuration
from h2.connection import AllowedStreamIDs
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event
from h2.exceptions import DenialOfServiceError, FlowControlError, FrameTooLargeError, ProtocolError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream
from hyperframe.exceptions import InvalidPaddingError
from hyperframe.frame import Frame, GoAwayFrame, SettingsFrame

from gateway.grpc.wire.known_headers import KnowingDecoder, KnowingEncoder
from gateway.grpc.wire.opening import HEADER_BYTES_MAX, Headers
from gateway.grpc.wire.plain_frames import PlainFrames

WINDOW_BYTES = 256 << 10
"""How much of a call is received before it is read. With 64 KiB, requests of that size take 1.5 times as long."""
STREAMS_MAX = (1 << 31) - 1
"""The calls of all connections together are bounded (`gateway.grpc.wire.rules.RpcLimit`)."""
SWEEP_AT_LEAST = 16
SIZE_BYTES = 3
"""With which each frame begins."""
REFUSABLE_BYTES = 256 << 10
"""With larger headers than this, counted alike, a client loses its connection; with smaller ones the call alone. h2
would take 64 KiB."""
SETTINGS = frozenset(SettingCodes)
SETTINGS_KIND = b"\x04"
SETTINGS_BYTES_MAX = 32 * 6
"""Of one frame: of 32 settings, as nghttp2 takes them. Reading the 2730 that fit into one takes some milliseconds."""
HEADER_FRAMES_MAX = 32
"""Frames in which the headers of one call may come: twice as many as the largest headers need that are read."""

# h2 makes the text of each frame that it reads, for a log that nobody keeps: a sixth of what reading a frame takes.
Frame.__repr__ = object.__repr__  # type: ignore[method-assign]


class Broken(Event):
    """What has come is no HTTP/2, and the client has been told why. Nothing more is to be received or sent."""


class Http2(PlainFrames):
    """h2's server side of a connection. It differs from h2's own where each method says so."""

    MAX_CLOSED_STREAMS = 1 << 12
    """Of h2's 65,536 streams that it remembers to have been closed, each takes 150 bytes."""

    def __init__(self) -> None:
        super().__init__(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                # For h2 a header that breaks a rule ends the connection, with the calls of everybody on it. Clients let
                # such metadata through: a space at a value's end, a key `host` or `connection`.
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
                normalize_outbound_headers=False,
                validate_outbound_headers=False,
            )
        )
        mine = {
            SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
            SettingCodes.MAX_HEADER_LIST_SIZE: HEADER_BYTES_MAX,
            SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
        }
        self.local_settings = Settings(client=False, initial_values=mine)
        self.encoder, self.decoder = KnowingEncoder(), KnowingDecoder()
        self.decoder.max_header_list_size = REFUSABLE_BYTES
        self._sweep_at = SWEEP_AT_LEAST

    def receive(self, data: bytes) -> Iterator[list[Event]]:
        """What the bytes say, frame by frame.

        h2 would look at all frames before it tells of the first. Those that the caller does not ask for are kept until
        the next call.
        """
        buffer: Any = self.incoming_buffer
        buffer.max_frame_size = self.max_inbound_frame_size
        try:
            buffer.add_data(data)
            while (events := self.read_plain() or self._read_frame(buffer)) is not None:
                yield events
            self._refuse_large()
        except InvalidPaddingError:
            yield self._broken(ErrorCodes.PROTOCOL_ERROR)
        except ProtocolError as error:
            yield self._broken(error.error_code)

    def finish(self) -> None:
        """Nothing more is to be received. h2's table of what does it refers to this connection itself."""
        self._frame_dispatch_table: dict[Any, Any] = {}

    def _read_frame(self, buffer: Iterator[Frame]) -> list[Event] | None:
        """What the next frame says; None when no whole one has come."""
        head = cast("Any", buffer)._data[: SIZE_BYTES + 1]  # noqa: SLF001
        if head[SIZE_BYTES:] == SETTINGS_KIND and int.from_bytes(head[:SIZE_BYTES]) > SETTINGS_BYTES_MAX:
            raise DenialOfServiceError("too many settings")
        frame = next(buffer, None)
        return None if frame is None else self._receive_frame(frame)

    @property
    def has_to_send(self) -> bool:
        """Whether something is ready to be written."""
        return self._data_to_send != b""

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of headers whose end has not come."""
        buffer: Any = self.incoming_buffer
        return sum([len(frame.data) for frame in buffer._headers_buffer])  # noqa: SLF001

    def answer(self, number: int, headers: Headers, *, end_stream: bool = False) -> None:
        """Sends the headers before an answer's first message, or behind its last, which end the stream."""
        if not self.send_plain_headers(number, headers, end_stream=end_stream):
            self.send_headers(number, headers, end_stream)

    def send_at_once(self, number: int, data: bytes) -> bool:
        """Sends bytes of a stream in one frame. False: they do not fit into a frame, or into a window."""
        if self.send_plain(number, data):
            return True
        try:
            self.send_data(number, data)
        except (FlowControlError, FrameTooLargeError):
            return False
        return True

    def _refuse_large(self) -> None:
        """Refuses a frame that is too large before a client can fill the memory with it, and headers alike. h2 looks at
        their size when all of them has come."""
        buffer: Any = self.incoming_buffer
        size = int.from_bytes(buffer._data[:SIZE_BYTES])  # noqa: SLF001
        if size > self.max_inbound_frame_size or len(buffer._headers_buffer) > HEADER_FRAMES_MAX:  # noqa: SLF001
            raise FrameTooLargeError("the frame is too large")

    def _broken(self, code: ErrorCodes) -> list[Event]:
        self._terminate_connection(code)
        return [Broken()]

    @property
    def open_inbound_streams(self) -> int:
        """How many streams are open, or were not long ago.

        h2 asks with each stream that begins, and then looks at all of them. Here it looks when they have doubled.
        """
        if len(self.streams) >= self._sweep_at:
            self._sweep_at = SWEEP_AT_LEAST + 2 * super().open_inbound_streams
        return len(self.streams)

    def _begin_new_stream(self, stream_id: int, allowed_ids: AllowedStreamIDs) -> H2Stream:
        """h2 ends the connection where `content-length` is wrong. Here nothing needs it: messages say their lengths."""
        stream = super()._begin_new_stream(stream_id, allowed_ids)
        stream._initialize_content_length = lambda _headers: None  # type: ignore[method-assign]  # noqa: SLF001
        return stream

    def _receive_settings_frame(self, frame: SettingsFrame) -> tuple[list[Any], list[Event]]:
        """Settings that HTTP/2 does not know are ignored; h2 would keep all 65,536 of them, in 58 MB.

        The table of headers only becomes smaller. A client may allow 4 GiB, and h2 would use them; and of several
        changes between two headers it forgets some, and tells of some that hold no longer."""
        frame.settings = {code: value for code, value in frame.settings.items() if code in SETTINGS}
        allowed = frame.settings.pop(SettingCodes.HEADER_TABLE_SIZE, self.encoder.header_table_size)
        told = super()._receive_settings_frame(frame)
        if allowed < self.encoder.header_table_size:
            self.encoder.header_table_size = allowed
            del self.encoder.table_size_changes[:-1]
        return told

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Any], list[Event]]:
        """A client that leaves still gets the answers to what it has asked. For h2 the connection would be closed."""
        del frame
        return [], [ConnectionTerminated()]
