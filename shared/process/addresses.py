"""Addresses: how one is written and read, and what to change where nothing can listen on one."""

from __future__ import annotations

import errno
import socket

FOREIGN = {errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN}
PORT_MAX = 65535
"""asyncio takes a larger port for another one."""


def authority(host: str, port: int) -> str:
    """A host and a port as they stand in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of host:port. Raises ValueError when there are none."""
    host, separator, port = address.rpartition(":")
    if not (separator and host and "/" not in host and is_number(port, 1, PORT_MAX)):
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def is_number(text: str, least: int, most: int) -> bool:
    """Whether a text is a whole number within bounds."""
    # isdecimal alone takes other scripts' digits, too.
    return text.isascii() and text.isdecimal() and least <= int(text) <= most


def is_foreign(refused: OSError) -> bool:
    """Whether the host is no address of this machine, or no address at all, so that another port would not help."""
    return refused.errno in FOREIGN


def remedy(refused: OSError, port_option: str) -> str:
    """Which option helps. port_option: that of the port"""
    return "--host names an address of this machine" if is_foreign(refused) else f"{port_option} names another port"
