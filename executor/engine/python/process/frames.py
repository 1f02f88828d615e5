"""Whole frames between an executor and the process of an instance, each way over a socket and a piece of shared memory.

A frame of up to `INLINE_BYTES` goes through the socket. A larger one lies in the sender's segment, and only its size
goes through the socket. So a segment holds one frame: its receiver has read it before the sender writes again, because
a call and its answer take turns.

A segment is an anonymous file (memfd) that both processes inherit. It has no name that could be left behind, and
counts neither against /dev/shm nor its size in a container: the kernel frees it with the last process that has it open,
however that ends. It is sealed against shrinking, because whoever reads memory that is cut off gets SIGBUS.

What is received is checked before it is used: the other side may be a process whose memory a model has damaged.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

INLINE_BYTES = 1 << 16
"""Longest frame that goes through the socket, where there are segments: it fits into the socket's buffer."""
ALONE_BYTES = 16 << 20
"""Longest frame of a socket without segments."""
KEPT_BYTES = 64 << 20
"""Memory that a segment keeps for the next frame. What a larger one took is given back when the next one is sent."""
SEGMENT_BYTES_MIN = 1 << 20

T = TypeVar("T")
_HEADER = struct.Struct("<BQ")
"""Where the frame is; its size in bytes."""
INLINE, IN_SEGMENT = 0, 1


class FrameError(Exception):
    """The other side has ended, or what it sent is no frame."""


class EndedError(FrameError):
    """The other side has ended."""


class SharedMemory:
    """Memory that two processes share. descriptor: of its file; it is closed with the segment"""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = None
        self._used = 0

    @classmethod
    def made(cls) -> SharedMemory:
        """A new one, empty."""
        descriptor = os.memfd_create("seqmesh-instance", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(descriptor)

    def write(self, frame: bytes) -> None:
        memory = self._memory
        if memory is not None and self._used > KEPT_BYTES:
            memory.madvise(mmap.MADV_REMOVE)
        if memory is None or len(memory) < len(frame):
            size = max(SEGMENT_BYTES_MIN, 1 << (len(frame) - 1).bit_length())
            os.ftruncate(self.descriptor, size)
            memory = self._mapped(size)
        memory[: len(frame)] = frame
        self._used = len(frame)

    def read(self, size: int, decode: Callable[[memoryview], T]) -> T:
        """What `decode` makes of the frame, which it must not keep. Raises FrameError if there are not so many
        bytes.
        """
        memory = self._memory
        if memory is None or len(memory) < size:
            there = os.fstat(self.descriptor).st_size
            if there < size:
                raise FrameError(f"a frame of {size} bytes in a segment of {there}")
            memory = self._mapped(there)
        with memoryview(memory) as view, view[:size] as frame:
            return decode(frame)

    def _mapped(self, size: int) -> mmap.mmap:
        if self._memory is not None:
            self._memory.close()
        self._memory = mmap.mmap(self.descriptor, size)
        return self._memory

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        os.close(self.descriptor)


class Frames:
    """One end. outgoing, incoming: the segments of this side and of the other; without them every frame goes through
    the socket.
    """

    def __init__(
        self, end: socket.socket, outgoing: SharedMemory | None = None, incoming: SharedMemory | None = None
    ) -> None:
        self.socket = end
        self._outgoing = outgoing
        self._incoming = incoming
        self._inline_bytes = INLINE_BYTES if outgoing is not None else ALONE_BYTES

    def send(self, frame: bytes) -> None:
        """Raises FrameError if the other side has ended, or the frame is too long for a socket alone."""
        size = len(frame)
        try:
            if size <= self._inline_bytes:
                self.socket.sendall(_HEADER.pack(INLINE, size) + frame)
                return
            if self._outgoing is None:
                raise FrameError(f"a frame of {size} bytes, and {self._inline_bytes} are the most")
            self._outgoing.write(frame)
            self.socket.sendall(_HEADER.pack(IN_SEGMENT, size))
        except OSError as error:
            raise EndedError(str(error)) from error

    def receive(self, decode: Callable[[memoryview], T]) -> T:
        """Waits for a frame; what `decode` makes of it, which must not keep it. Raises FrameError, also for what
        `decode` refuses with a ValueError.
        """
        place, size = _HEADER.unpack(self._exactly(_HEADER.size))
        try:
            if place == INLINE:
                if size > self._inline_bytes:
                    raise FrameError(f"a frame of {size} bytes, and {self._inline_bytes} are the most")
                return decode(memoryview(self._exactly(size)))
            if place != IN_SEGMENT or self._incoming is None:
                raise FrameError(f"a frame at the place {place}, and there is none")
            return self._incoming.read(size, decode)
        except (ValueError, OverflowError) as error:  # msgspec's errors are ValueErrors
            raise FrameError(f"a frame that means nothing: {error}") from error

    def _exactly(self, size: int) -> bytearray:
        found = bytearray(size)
        rest = memoryview(found)
        try:
            while rest:
                got = self.socket.recv_into(rest)
                if not got:
                    raise EndedError("the connection is closed")
                rest = rest[got:]
        except OSError as error:
            raise EndedError(str(error)) from error
        return found

    def close(self) -> None:
        self.socket.close()
        for segment in (self._outgoing, self._incoming):
            if segment is not None:
                segment.close()
