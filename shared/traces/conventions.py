"""What OpenTelemetry's semantic conventions say of the mesh's spans, so that tracing systems know them. Pure.

Source: https://opentelemetry.io/docs/specs/semconv/ (http/http-spans, rpc/rpc-spans, messaging/messaging-spans,
database/database-spans, general/recording-errors).
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.contract.endpoints import Endpoint
from shared.traces.spans import AttributeValue, SpanName

CONVENTIONAL: Mapping[str, Mapping[str, AttributeValue]] = {
    SpanName.GATEWAY: {"messaging.system": "redis", "messaging.operation.type": "send"},
    SpanName.BATCH: {"messaging.system": "redis", "messaging.operation.type": "process"},
    SpanName.CHECKPOINT: {
        "db.system.name": "redis",
        "db.operation.name": "FCALL",
        "db.stored_procedure.name": "commit",
    },
}
"""Attributes that every span of a name has."""

_UNARY: Mapping[str, AttributeValue] = {
    "rpc.system": "grpc",
    "rpc.service": "inference.GRPCInferenceService",
    "rpc.method": "ModelInfer",
}
ENDPOINTS: Mapping[Endpoint, Mapping[str, AttributeValue]] = {
    Endpoint.INFER: {"http.request.method": "POST", "http.route": "/v2/models/{model}/infer"},
    Endpoint.GENERATE: {"http.request.method": "POST", "http.route": "/v2/models/{model}/generate"},
    Endpoint.MODEL_INFER: _UNARY,
    Endpoint.MODEL_STREAM_INFER: {**_UNARY, "rpc.method": "ModelStreamInfer"},
}
"""Attributes of a step's span, by the way that its request came."""
ERROR_TYPE = "error.type"
