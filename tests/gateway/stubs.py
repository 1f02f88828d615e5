"""The stubs of GRPCInferenceService, for what tritonclient hides. Made at run time, they have no types."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

pb_grpc: Any = service_pb2_grpc


@asynccontextmanager
async def stub_at(port: int) -> AsyncGenerator[Any]:
    """A stub with a channel of its own to this port of this machine."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.GRPCInferenceServiceStub(channel)
