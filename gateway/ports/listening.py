"""Listening sockets: how they are opened, and how they are closed so that no connection is lost; and what the system
knows of sockets.

A client counts as connected before the server has accepted it: the system queues its connection at one listening
socket. Who closes that socket resets what is queued, also where other processes listen on the same port. So `quieten`
comes first: a filter lets the system drop each further client's first packet (SYN), which the client sends again a
second later, when the port is another gateway's or nobody's. What was begun before is completed and accepted.

Source: socket(7), SO_REUSEPORT and SO_ATTACH_FILTER; tcp(7), TCP_INFO; linux/filter.h.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import sys
from contextlib import suppress
from typing import NamedTuple

from shared.contract.errors import UnavailableError
from shared.process.addresses import remedy

BACKLOG = 1024
"""Connections that may wait to be accepted. Large, for many clients that start at once."""
QUIET_S = 0.1
"""How long a connection that has begun may take to be made: a round trip to a client far away."""
QUEUE_S = 1.0
"""How long connections that are made may then take to be accepted, on a busy machine."""
LOOK_S = 0.01
KEEPALIVE = (("TCP_KEEPIDLE", 45), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 5))
"""A client whose machine has vanished says nothing of it, and a stream may be silent for as long as it likes. So the
system asks after 45 s, less than what a NAT remembers a silent connection for, and gives it up after two minutes.
"""
SO_ATTACH_FILTER = 26
NO_SYN = (
    (0x30, 0, 0, 13),  # the flags of the TCP header
    (0x54, 0, 0, 0x12),  # SYN and ACK among them
    (0x15, 0, 1, 0x02),  # SYN alone: the next line; else the one after it
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
)
"""The filter: struct sock_filter, as code, jump if true, jump if false, operand. Accepted connections inherit it."""
TCP_INFO, TCP_INFO_BYTES = getattr(socket, "TCP_INFO", 11), 128
TCP_INFO_QUEUED, TCP_INFO_TAKEN = 24, 120
"""Where struct tcp_info has tcpi_unacked, which counts a listening socket's queued connections, and where it has
tcpi_bytes_acked."""


class PortName(NamedTuple):
    """What a port is called: the protocol that it speaks, and the option that sets it."""

    protocol: str
    option: str

    def refused(self, host: str, port: int, error: OSError) -> UnavailableError:
        text = f"{self.protocol} cannot listen on {host}:{port}: {error} ({remedy(error, self.option)})"
        return UnavailableError(text)


HTTP_PORT, GRPC_PORT = PortName("HTTP", "--http-port"), PortName("gRPC", "--grpc-port")
METRICS_PORT = PortName("HTTP", "--metrics-port")


def listen(host: str, port: int, *, of: PortName = HTTP_PORT, is_shared: bool = False) -> socket.socket:
    """A listening socket; port 0 picks a free one.

    is_shared  other processes of this user may listen on the port, too, if they say the same
    raises     UnavailableError when the address cannot be had
    """
    server = bound(host, port, of=of, is_shared=is_shared)
    try:
        server.listen(BACKLOG)
    except OSError as error:
        server.close()
        raise of.refused(host, port, error) from error
    server.setblocking(False)  # noqa: FBT003  the socket module's own signature
    return server


def bound(host: str, port: int, *, of: PortName = HTTP_PORT, is_shared: bool = False) -> socket.socket:
    """A socket that is bound and does not listen. Arguments and errors as of `listen`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Accepted connections take these over.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if (option := getattr(socket, name, None)) is not None:
                server.setsockopt(socket.IPPROTO_TCP, option, value)
        if is_shared:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((host, port))
    except OSError as error:
        server.close()
        raise of.refused(host, port, error) from error
    return server


async def quieten(listening: socket.socket) -> None:
    """Lets no further connection begin. Returns when those that had begun are accepted, by whoever accepts there.

    Where the system takes no such filter, it returns at once.
    """
    if sys.platform != "linux":
        return
    loop = asyncio.get_running_loop()
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in NO_SYN))
    given = struct.pack("HP", len(NO_SYN), ctypes.addressof(program))
    try:
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, given)
    except OSError:
        return
    await asyncio.sleep(QUIET_S)
    end = loop.time() + QUEUE_S
    while queued(listening) and loop.time() < end:  # noqa: ASYNC110 - the system tells nobody of its queue
        await asyncio.sleep(LOOK_S)


def queued(listening: socket.socket) -> int:
    """Connections of a listening socket that are made and not accepted; 0 where the system does not say."""
    return tcp_info(listening, "I", TCP_INFO_QUEUED)


def progress(connection: asyncio.Transport) -> int:
    """A number that changes while the other side of a connection takes what it was sent."""
    its = connection.get_extra_info("socket")
    taken = 0 if its is None else tcp_info(its, "Q", TCP_INFO_TAKEN)
    return taken - connection.get_write_buffer_size()


def tcp_info(of: socket.socket, form: str, begin: int) -> int:
    """A number of struct tcp_info; 0 where the system does not say, and of a closed socket (ValueError: uvloop's)."""
    with suppress(OSError, ValueError, struct.error):
        return struct.unpack_from(form, of.getsockopt(socket.IPPROTO_TCP, TCP_INFO, TCP_INFO_BYTES), begin)[0]
    return 0
