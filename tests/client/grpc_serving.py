"""Servers of a test's own that speak the protocol of the clients."""

from __future__ import annotations

from collections.abc import Generator
from concurrent import futures
from contextlib import contextmanager
from typing import Any, cast

import grpc
from tritonclient.grpc import service_pb2_grpc


@contextmanager
def served(service: object) -> Generator[str]:
    """Where a servicer of the inference service is served meanwhile: host and port."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    cast("Any", service_pb2_grpc).add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
