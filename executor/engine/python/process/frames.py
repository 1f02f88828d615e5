"""Whole frames between an executor and the process of an instance, each way over a socket and a piece of shared memory.

A frame of up to `INLINE_BYTES` goes through the socket. A larger one lies in the sender's segment, and only its size
goes through the socket. A segment holds one frame. Its receiver has read it before the sender writes again: a call and
its answer take turns, and where frames do not, the sender waits until the receiver says so (an eventfd).

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import TypeVar

INLINE_BYTES = 1 << 16
"""Longest frame that goes through the socket: it fits into the socket's buffer."""
KEPT_BYTES = 64 << 20
"""Memory that a segment keeps for the next frame. What a larger one took is given back when the next one is sent."""
SEGMENT_BYTES_MIN = 1 << 20

T = TypeVar("T")
_HEADER = struct.Struct("<BQ")
"""Where the frame is; its size in bytes."""
INLINE, IN_SEGMENT = 0, 1


class FrameError(Exception):
    """The other side has ended, what it sent is no frame, or there is no memory for a frame. Nothing can come after it:
    the two sides do not agree any more on what was said.
    """


class EndedError(FrameError):
    """The other side has ended; nothing comes any more."""


class SharedMemory:
    """Memory that two processes share.

    descriptor  of its file; it is closed with the segment
    free        an eventfd that is 1 while nobody has to read the frame; None where frames take turns by themselves
    """

    def __init__(self, descriptor: int, free: int | None = None) -> None:
        self.descriptor = descriptor
        self.free = free
        self._memory: mmap.mmap | None = None
        self._used = 0

    @classmethod
    def made(cls, *, waits: bool = False) -> SharedMemory:
        """A new one, empty. waits: a second frame waits until the first one is read"""
        made = cls(os.memfd_create("seqmesh-instance", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        with ExitStack() as opened:
            opened.callback(made.close)
            fcntl.fcntl(made.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            made.free = os.eventfd(1, os.EFD_CLOEXEC) if waits else None
            opened.pop_all()
        return made

    def write(self, frame: bytes) -> None:
        """Raises FrameError if there is no memory for the frame."""
        if self.free is not None:
            os.eventfd_read(self.free)
        memory = self._memory
        if memory is not None and self._used > KEPT_BYTES:
            memory.madvise(mmap.MADV_REMOVE)
        if memory is None or len(memory) < len(frame):
            memory = self._mapped(max(SEGMENT_BYTES_MIN, 1 << (len(frame) - 1).bit_length()), grows=True)
        memory[: len(frame)] = frame
        self._used = len(frame)

    def read(self, size: int, decode: Callable[[memoryview], T]) -> T:
        """What `decode` makes of the frame, which it must not keep. Raises FrameError if there are not so many bytes,
        and if there is no memory to read them.
        """
        memory = self._memory
        if memory is None or len(memory) < size:
            there = os.fstat(self.descriptor).st_size
            if there < size:
                raise FrameError(f"a frame of {size} bytes in a segment of {there}")
            memory = self._mapped(there)
        try:
            with memoryview(memory) as view, view[:size] as frame:
                return decode(frame)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Nobody has to read the frame any more; a sender that waits goes on."""
        if self.free is not None:
            os.eventfd_write(self.free, 1)

    def _mapped(self, size: int, *, grows: bool = False) -> mmap.mmap:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        try:
            if grows:
                os.ftruncate(self.descriptor, size)
            self._memory = mmap.mmap(self.descriptor, size)
        except OSError as error:
            raise FrameError(f"no memory for frames of up to {size} bytes: {error}") from error
        return self._memory

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        os.close(self.descriptor)
        if self.free is not None:
            os.close(self.free)


class Frames:
    """One end. outgoing, incoming: the segments of this side and of the other"""

    def __init__(self, end: socket.socket, outgoing: SharedMemory, incoming: SharedMemory) -> None:
        self.socket = end
        self._outgoing = outgoing
        self._incoming = incoming

    @property
    def descriptors(self) -> list[int]:
        """All that another process needs for this end: see `inherited`."""
        segments = (self._outgoing, self._incoming)
        free = [-1 if one.free is None else one.free for one in segments]
        return [self.socket.fileno(), *(one.descriptor for one in segments), *free]

    @classmethod
    def inherited(cls, descriptors: Sequence[int]) -> Frames:
        """The end that this process was given. Processes that it starts do not hold it open."""
        for descriptor in descriptors:
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)  # noqa: FBT003 - a function of C
        end, *files = descriptors
        free = [None if one < 0 else one for one in files[2:]]
        return cls(socket.socket(fileno=end), SharedMemory(files[0], free[0]), SharedMemory(files[1], free[1]))

    def send(self, frame: bytes) -> None:
        """Raises EndedError if the other side has ended, and FrameError if there is no memory for the frame."""
        size = len(frame)
        try:
            if size <= INLINE_BYTES:
                self.socket.sendall(_HEADER.pack(INLINE, size) + frame)
                return
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
                if size > INLINE_BYTES:
                    raise FrameError(f"a frame of {size} bytes, and {INLINE_BYTES} are the most")
                return decode(memoryview(self._exactly(size)))
            if place != IN_SEGMENT:
                raise FrameError(f"a frame at the place {place}, and there is none")
            return self._incoming.read(size, decode)
        except (ValueError, OverflowError) as error:  # msgspec's errors are ValueErrors
            raise FrameError(f"a frame that means nothing: {error}") from error
        except MemoryError as error:
            raise FrameError(f"no memory for what a frame of {size} bytes says") from error

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

    def shut_down(self) -> None:
        """Wakes whoever waits at this end; nothing goes through it any more."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._outgoing.let_go()

    def close(self) -> None:
        self.socket.close()
        self._outgoing.close()
        self._incoming.close()


def pair(*, waits: bool = False) -> tuple[Frames, Frames]:
    """Two ends of one connection: this process's, and the one that another process is given (`descriptors`), which
    shares this one's segments. waits: see `SharedMemory.made`. Raises OSError, and leaves nothing open then.
    """
    with ExitStack() as opened:
        mine, theirs = (opened.enter_context(end) for end in socket.socketpair())
        outgoing, incoming = (opened.enter_context(closing(SharedMemory.made(waits=waits))) for _ in range(2))
        opened.pop_all()
    return Frames(mine, outgoing, incoming), Frames(theirs, incoming, outgoing)
