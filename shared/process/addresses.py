"""Addresses to listen on: what to change where one cannot be had."""

from __future__ import annotations

import errno
import socket

FOREIGN = {errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN}


def is_foreign(refused: OSError) -> bool:
    """Whether the host is no address of this machine, or no address at all, so that another port would not help."""
    return refused.errno in FOREIGN


def remedy(refused: OSError, port_option: str) -> str:
    """Which option helps. port_option: that of the port"""
    return "--host names an address of this machine" if is_foreign(refused) else f"{port_option} names another port"
