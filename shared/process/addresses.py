"""Addresses: how one is written, and what to change where nothing can listen on one."""

from __future__ import annotations

import errno
import socket

FOREIGN = {errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN}


def authority(host: str, port: int) -> str:
    """A host and a port as they stand in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_foreign(refused: OSError) -> bool:
    """Whether the host is no address of this machine, or no address at all, so that another port would not help."""
    return refused.errno in FOREIGN


def remedy(refused: OSError, port_option: str) -> str:
    """Which option helps. port_option: that of the port"""
    return "--host names an address of this machine" if is_foreign(refused) else f"{port_option} names another port"
