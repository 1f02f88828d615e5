"""The protobuf classes of the v2 protocol. They come from the `tritonclient` package, so there is only one definition.

The classes are made at run time and have no stubs: to the type checker every message is `Any`. The names below say
what is meant. A value that is read out of a message gets its type where it is read.

Importing any part of `tritonclient.grpc` imports the client too: 57 ms beside grpc and numpy, once per process.
"""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2

pb: Any = service_pb2
"""Messages of package `inference`."""

InferRequest = Any
"""inference.ModelInferRequest"""
InferResponse = Any
"""inference.ModelInferResponse"""
StreamInferResponse = Any
"""inference.ModelStreamInferResponse"""
InferParameter = Any
"""inference.InferParameter"""
AnyMessage = Any
"""Another message; the method's name says which."""
