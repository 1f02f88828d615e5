"""Which gateway the calls of this executor go through, and the connection to it.

One gateway at a time, on this machine if there is one. When it goes away, the next call finds another one. The
connection is made with the first call: most executors never need one, nor gRPC.
"""

from __future__ import annotations

import asyncio
import importlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from executor.settings import ExecutorSettings
from shared.process import logs
from shared.process.lifecycle import end
from shared.store.commands import Redis
from shared.store.company import call_addresses, services
from shared.store.keyspace import Keyspace

INT32_MAX = (1 << 31) - 1
PING_S = 360
"""After so long without a word a connection with calls is pinged. Gateways allow a ping every 300 s, as Triton does."""
SILENT_S = 20
"""A gateway whose machine is lost says nothing of it: it counts as gone when it acknowledges nothing for so long."""
OPTIONS = (
    ("grpc.max_send_message_length", INT32_MAX),
    ("grpc.max_receive_message_length", INT32_MAX),
    # With these two gRPC sets TCP_USER_TIMEOUT, too: what is sent must be acknowledged within the second one.
    ("grpc.keepalive_time_ms", PING_S * 1000),
    ("grpc.keepalive_timeout_ms", SILENT_S * 1000),
    # A gateway of the mesh is reached directly, whatever proxy the environment names for hosts elsewhere.
    ("grpc.enable_http_proxy", 0),
    # Not one that another executor in this process uses (tests), nor one that lost its gateway.
    ("grpc.use_local_subchannel_pool", 1),
)
TLS = "grpcs"
SERVICE = "/inference.GRPCInferenceService"


@dataclass(frozen=True, eq=False, slots=True)
class CallGateway:
    """A gateway in use. infer, ready, stream: the RPCs, as grpc.aio calls them, of encoded requests"""

    address: str
    channel: Any
    infer: Any
    ready: Any
    stream: Any


class NoGatewayError(Exception):
    """No gateway takes calls now."""


class Gateways:
    """Finds gateways, and holds the connection to one of them."""

    def __init__(self, settings: ExecutorSettings, redis: Redis, keys: Keyspace) -> None:
        self._settings = settings
        self._redis = redis
        self._keys = keys
        self._used: CallGateway | None = None
        self._lost = ""
        self._closing: set[asyncio.Task[None]] = set()

    async def current(self) -> CallGateway:
        """The gateway to use. Raises NoGatewayError, and what redis-py raises."""
        if self._used is not None:
            return self._used
        addresses = self._settings.calls_through or call_addresses(await services(self._redis, self._keys))
        # The one that was lost comes last: it may be the only one, and be back.
        others = [address for address in addresses if address != self._lost] or list(addresses)
        if not others:
            raise NoGatewayError("no gateway of the mesh takes calls (--grpc-advertise, --calls-through)")
        if self._used is None:  # nobody else has been faster meanwhile
            self._used = self._connected(random.choice(others) if self._settings.calls_through else others[0])
            logs.info("calls between models go through", gateway=self._used.address)
        return self._used

    def lost(self, gateway: CallGateway) -> None:
        """The gateway does not answer any more, or stops: the next call goes through another one."""
        if self._used is gateway:
            self._used, self._lost = None, gateway.address
            logs.warning("gateway lost, calls between models look for another one", gateway=gateway.address)
            # Calls of others on it may still be answered: the connection ends when they have.
            closing = asyncio.create_task(gateway.channel.close(grace=self._settings.call_timeout_secs))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Ends the connections, with the calls on them."""
        await end(list(self._closing))
        if self._used is not None:
            await self._used.channel.close()

    def _connected(self, address: str) -> CallGateway:
        import grpc  # noqa: PLC0415
        from tritonclient.grpc import service_pb2  # noqa: PLC0415

        pb: Any = service_pb2
        parts = urlsplit(address)
        if parts.scheme == TLS:
            channel: Any = grpc.aio.secure_channel(parts.netloc, self._credentials(grpc), options=OPTIONS)
        else:
            channel = grpc.aio.insecure_channel(parts.netloc, options=OPTIONS)
        infer = channel.unary_unary(f"{SERVICE}/ModelInfer", None, pb.ModelInferResponse.FromString)
        ready = channel.unary_unary(f"{SERVICE}/ModelReady", None, pb.ModelReadyResponse.FromString)
        stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer", None, pb.ModelStreamInferResponse.FromString)
        return CallGateway(address, channel, infer, ready, stream)

    def _credentials(self, grpc: Any) -> Any:
        settings = self._settings
        root, key, cert = (
            Path(name).read_bytes() if name else None
            for name in (settings.call_root_cert, settings.call_client_key, settings.call_client_cert)
        )
        return grpc.ssl_channel_credentials(root, key, cert)


def load_grpc() -> None:
    """Imports gRPC, which takes a while: on the thread of the first model that calls, not on the event loop."""
    importlib.import_module("grpc")
    importlib.import_module("tritonclient.grpc.service_pb2")
