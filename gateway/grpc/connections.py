"""The connections of the gRPC port when the gateway leaves: each one is closed in a moment in which it has no call.

grpc.aio stops a server as a whole, and ends the calls that arrive while it tells its clients so with CANCELLED: no
client takes that for a lost connection. So the sockets are closed from here, the listening one first, and only then
the server is stopped, which nobody notices any more. What a client sends in the very moment in which its connection
closes, the transport answers with UNAVAILABLE.

The transport does not show its sockets. They are found among this process's open files by the port they belong to; a
connection goes by its client's port, so two clients of different hosts with the same port are taken for one, and wait
for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPEN_FILES = Path("/dev/fd")
LOOK_INTERVAL_S = 0.02
"""How often connections without any call are looked for; one whose last call has just ended is closed at once."""

Context = Any
"""grpc.aio.ServicerContext; its methods carry no types."""


class GrpcConnections:
    """The calls of one port, by connection. port: assigned when it is open."""

    def __init__(self) -> None:
        self._calls: set[Context] = set()
        self.port = 0
        self._leaving = False
        self._files: dict[int, int] = {}
        self._closed: set[int] = set()

    def enter(self, context: Context) -> bool:
        """A call has come; False when its connection is closed already: nobody would get its answer."""
        self._calls.add(context)
        context.add_done_callback(self._ended)
        return not self._closed or client_port(context) not in self._closed

    async def leave(self) -> None:
        """Accepts no connection any more, and closes those there are as their calls end. Returns when none is left."""
        self._leaving = True
        while self._close_quiet():  # noqa: ASYNC110 - nobody tells of a connection that comes or goes without a call
            await asyncio.sleep(LOOK_INTERVAL_S)

    def cut(self, client: int) -> None:
        """Closes a connection now, with all of its calls: the transport gives back what it holds for it."""
        for file, found in sockets_of(self.port):
            if found == client:
                shut(file, self.port, client, socket.SHUT_RDWR)

    def _ended(self, context: Context) -> None:
        # Told when the last byte of the answer was written: closing cuts off nothing.
        self._calls.discard(context)
        if self._leaving:
            client = client_port(context)
            if client in self._files and client not in self._busy():
                self._close(client, self._files[client])

    def _close_quiet(self) -> bool:
        """Closes what has no call; whether any connection is still open."""
        busy = self._busy()
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
        del self._files[client]
        self._closed.add(client)
        shut(file, self.port, client)

    def _busy(self) -> set[int]:
        return {client_port(context) for context in self._calls}


TCP_INFO = getattr(socket, "TCP_INFO", 11)
TCP_INFO_BYTES = 232
LISTENING = 0
"""In place of a client's port."""
GONE = -1
"""Likewise: of a call whose connection is lost."""


def client_port(context: Context) -> int:
    """Of a call's connection, or GONE.

    source  gRPC names peers `ipv4:127.0.0.1:50000`, `ipv6:%5B::1%5D:50000`, and a lost one "" or `unknown`
    """
    port = context.peer().rpartition(":")[2]
    return int(port) if port.isdecimal() else GONE


def sockets_of(port: int) -> Iterator[tuple[int, int]]:
    """Open files that are TCP sockets of a local port, each with its client's port, or LISTENING."""
    for path in OPEN_FILES.iterdir():
        with contextlib.suppress(OSError), borrowed(int(path.name)) as found:
            client = client_of(found, port)
            if client is not None:
                yield int(path.name), client


def client_of(found: socket.socket, port: int) -> int | None:
    """The client's port of a local port's socket, LISTENING for the one that accepts; None for any other socket."""
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
        return None
    if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return LISTENING
    return found.getpeername()[1]


def shut(file: int, port: int, client: int, how: int = socket.SHUT_WR) -> None:
    """Closes our side of a connection, if the file still is that one: its number may belong to another by now.

    how  SHUT_WR: what the client has not read yet still reaches it, before the end; SHUT_RDWR: the end, now
    """
    with contextlib.suppress(OSError), borrowed(file) as found:
        if client_of(found, port) == client:
            found.shutdown(how)


def received_bytes(file: int) -> int:
    """What has come over an open connection; 0 where the system does not say.

    source  linux/tcp.h, struct tcp_info: tcpi_bytes_received
    """
    with contextlib.suppress(OSError, struct.error), borrowed(file) as found:
        return struct.unpack_from("Q", found.getsockopt(socket.IPPROTO_TCP, TCP_INFO, TCP_INFO_BYTES), 128)[0]
    return 0


def close_listener(file: int) -> None:
    """Ends the listening socket by putting one without an address in its place: the transport, which is never told of
    any event of that one, goes on to own the file and closes it when it stops."""
    with socket.socket() as nowhere:
        os.dup2(nowhere.fileno(), file, inheritable=False)


@contextmanager
def borrowed(file: int) -> Generator[socket.socket]:
    """An open file as a socket, for a moment. Raises OSError when it is none."""
    if not stat.S_ISSOCK(os.fstat(file).st_mode):
        raise OSError(f"file {file} is no socket")
    with socket.socket(fileno=os.dup(file)) as found:
        yield found
