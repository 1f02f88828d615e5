"""Whether a gateway is ready, asked from outside."""

from __future__ import annotations

import asyncio
import socket

from shared.process.addresses import authority

PROBE_TIMEOUT_S = 2.0
NO_EXECUTOR = "no executor serves yet"
"""Why a gateway that answers is not ready: executors load their models, cannot, or are drained."""
NO_HTTP = "what listens there speaks no HTTP"


def reachable(host: str) -> str:
    """The address at which a listener on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 -- compared, not bound


async def unreadiness(host: str, port: int) -> str:
    """Why a gateway is not ready, in a few words; "" if it is ready, or tells only those who send a header."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                headers = f"host: {authority(host, port)}\r\nconnection: close\r\n"
                writer.write(f"GET /v2/health/ready HTTP/1.1\r\n{headers}\r\n".encode())
                protocol, *status = (await reader.readline()).split(maxsplit=2) or [b""]
            finally:
                writer.close()
    except TimeoutError:
        return "does not answer"
    except socket.gaierror as unknown:
        return f"its host cannot be resolved ({unknown.strerror})"
    except UnicodeError:
        return "its host cannot be resolved (no host has such a name)"
    except OSError:
        return "does not listen yet"
    except ValueError:  # a line without an end
        return NO_HTTP
    if not protocol.startswith(b"HTTP/"):
        return NO_HTTP
    return "" if status[:1] in ([b"200"], [b"403"]) else NO_EXECUTOR
