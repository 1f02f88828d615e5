"""Closes the connections of the gRPC port when the gateway stops, each at a moment at which it has no call.

grpc.aio can only stop a server as a whole. Calls that arrive while it does end with CANCELLED, and clients do not retry
that as they do a lost connection. So this module closes the sockets first, the listening one before all others, and the
server is stopped when no connection is left.

A client is told first: a GOAWAY frame says that this connection takes no new call, and clients open another one without
a word to their callers. What was on its way is still served, and clients close the connection themselves. The transport
has no function that sends this frame on one connection, so it is written between two frames of the transport: at a
moment without a call, when nothing waits to be sent. Under TLS this cannot be done. There, a call that a client sends
just while its connection closes gets UNAVAILABLE from the transport.

The transport does not show its sockets. They are found among this process's open files by the port they belong to. A
connection is identified by its client's port alone: two clients on different hosts with the same port count as one
connection, which is closed when neither has a call.

The client's port is asked of a call once, when its handler begins. When the handler has returned, grpc.aio gives the
call back to the transport, and whoever asks then ends the process by a signal (grpcio 1.81.2).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import stat
import struct
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.grpc.pb import Context
from gateway.ports.listening import TCP_INFO, quieten

OPEN_FILES = Path("/dev/fd")
GOAWAY = bytes.fromhex("000008 07 00 00000000 7fffffff 00000000")
"""The frame: NO_ERROR, and no stream that is open or on its way is refused (RFC 9113, section 6.8)."""
HEARD_S = 0.5
"""How long a connection stays open after its client was told."""
LOOK_INTERVAL_S = 0.02
"""Pause between two searches for connections without a call. One whose last call ends is closed without a search."""


class GrpcConnections:
    """The calls of one port, by connection. port, encrypted: set when the port is open."""

    def __init__(self) -> None:
        # Calls whose answer is not written to its last byte, each with its client's port.
        self._calls: dict[Context, int] = {}
        self.port = 0
        self.encrypted = False
        self._leaving = False
        self._told: dict[int, float] = {}
        self._files: dict[int, int] = {}
        self._closed: set[int] = set()

    def enter(self, context: Context) -> bool:
        """Notes a call. False when its connection is closed already, so that no client would get the answer."""
        client = self._calls[context] = client_port(context)
        context.add_done_callback(self._ended)
        return client not in self._closed

    def client(self, context: Context) -> int:
        """The client's port of a call's connection; GONE for a call that has ended, or whose connection is lost."""
        return self._calls.get(context, GONE)

    async def leave(self) -> None:
        """Stops accepting connections, and tells each client to leave when its connection has no call. A connection
        that is still there after HEARD_S is closed when it has no call. Returns when none is left.
        """
        listeners = [file for file, client in sockets_of(self.port) if client == LISTENING]
        await asyncio.gather(*(quieten_file(file) for file in listeners))
        self._leaving = True
        while self._close_quiet():  # noqa: ASYNC110 - nobody tells of a connection that comes or goes without a call
            await asyncio.sleep(LOOK_INTERVAL_S)

    def cut(self, client: int) -> None:
        """Closes a connection with all of its calls at once. The transport then frees what it holds for it."""
        for file, found in sockets_of(self.port):
            if found == client:
                shut(file, self.port, client, socket.SHUT_RDWR)

    def _ended(self, context: Context) -> None:
        # grpc.aio calls this when the last byte of the answer was written, so closing cuts off nothing.
        client = self._calls.pop(context, GONE)
        if self._leaving and client in self._files and client not in self._calls.values():
            self._close(client, self._files[client])

    def _close_quiet(self) -> bool:
        """Closes the connections without a call. Returns whether any connection is still open."""
        busy = set(self._calls.values())
        self._files = {}
        for file, client in sockets_of(self.port):
            if client == LISTENING:
                close_listener(file)
            elif client not in self._closed:
                self._files[client] = file
        for client, file in list(self._files.items()):
            if client not in busy:
                self._close(client, file)
        return bool(self._files)

    def _close(self, client: int, file: int) -> None:
        now_s = time.monotonic()
        if client not in self._told:
            is_told = not self.encrypted and tell(file, self.port, client)
            self._told[client] = now_s if is_told else -math.inf
        if now_s < self._told[client] + HEARD_S:
            return
        del self._files[client]
        self._closed.add(client)
        shut(file, self.port, client)


TCP_INFO_BYTES = 232
LISTENING = 0
"""Stands for a client's port: the socket is the listening one."""
GONE = -1
"""Stands for a client's port: the call's connection is lost."""


def client_port(context: Context) -> int:
    """The client's port of a call's connection, or GONE.

    source  gRPC names peers `ipv4:127.0.0.1:50000`, `ipv6:%5B::1%5D:50000`, and a lost one "" or `unknown`
    """
    port = context.peer().rpartition(":")[2]
    return int(port) if port.isdecimal() else GONE


def sockets_of(port: int) -> Iterator[tuple[int, int]]:
    """The open files that are TCP sockets of a local port, each with its client's port or LISTENING."""
    for path in OPEN_FILES.iterdir():
        with contextlib.suppress(OSError), borrowed(int(path.name)) as found:
            client = client_of(found, port)
            if client is not None:
                yield int(path.name), client


def client_of(found: socket.socket, port: int) -> int | None:
    """The client's port of a socket of this local port; LISTENING for the listening one; None for any other socket."""
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
        return None
    if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return LISTENING
    return found.getpeername()[1]


def shut(file: int, port: int, client: int, how: int = socket.SHUT_WR) -> None:
    """Closes our side of a connection. Does nothing if the file's number belongs to another socket by now.

    how  SHUT_WR: answers that are on their way still reach the client; SHUT_RDWR: ends the connection at once
    """
    with contextlib.suppress(OSError), borrowed(file) as found:
        if client_of(found, port) == client:
            found.shutdown(how)


def tell(file: int, port: int, client: int) -> bool:
    """Sends GOAWAY over a connection of this port. False where something else waits to be sent, or it is lost."""
    with contextlib.suppress(OSError), borrowed(file) as found:
        # Where the transport has to wait, the system's buffer is full, and takes this frame neither.
        return client_of(found, port) == client and found.send(GOAWAY, socket.MSG_DONTWAIT) == len(GOAWAY)
    return False


def received_bytes(file: int) -> int:
    """The bytes that have come over an open connection; 0 where the system does not say.

    source  linux/tcp.h, struct tcp_info: tcpi_bytes_received
    """
    with contextlib.suppress(OSError, struct.error), borrowed(file) as found:
        return struct.unpack_from("Q", found.getsockopt(socket.IPPROTO_TCP, TCP_INFO, TCP_INFO_BYTES), 128)[0]
    return 0


async def quieten_file(file: int) -> None:
    """`quieten` for the transport's own listening socket. The transport accepts what is queued there."""
    with borrowed(file) as found:
        await quieten(found)


def close_listener(file: int) -> None:
    """Ends the listening socket by putting an unbound socket at its file number.

    The transport still owns that number and closes it when it stops. If the file were closed here, its number could be
    given to another file, which the transport would then close.
    """
    with socket.socket() as nowhere:
        os.dup2(nowhere.fileno(), file, inheritable=False)


@contextmanager
def borrowed(file: int) -> Generator[socket.socket]:
    """An open file as a socket, within the block. Raises OSError when the file is no socket."""
    if not stat.S_ISSOCK(os.fstat(file).st_mode):
        raise OSError(f"file {file} is no socket")
    # A duplicate: closing it at the end of the block leaves the transport's own file open.
    with socket.socket(fileno=os.dup(file)) as found:
        yield found
