"""The stubs of GRPCInferenceService, for what tritonclient hides. Made at run time, they have no types."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2_grpc

pb_grpc: Any = service_pb2_grpc
