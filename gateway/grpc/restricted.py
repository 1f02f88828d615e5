"""Refuses calls to restricted parts of the gRPC protocol that lack the secret metadata key.

Options `--restricted-api` and `--grpc-restricted-protocol`. The metadata key is the option's key with Triton's prefix.
A call is refused before its message is read.

Source: triton-spec 5.2; Triton server, `grpc_server.cc`, restricted protocols.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from gateway.access.restrictions import Restriction
from gateway.grpc.pb import pb

KEY_PREFIX = "triton-grpc-protocol-"
RPCS = {
    "health": ("ServerLive", "ServerReady", "ModelReady"),
    "metadata": ("ServerMetadata", "ModelMetadata"),
    "inference": ("ModelInfer", "ModelStreamInfer"),
    "model-config": ("ModelConfig",),
    "statistics": ("ModelStatistics",),
    "model-repository": ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    "shared-memory": tuple(
        f"{kind}SharedMemory{action}" for kind in ("System", "Cuda") for action in ("Status", "Register", "Unregister")
    ),
    "trace": ("TraceSetting",),
    "logging": ("LogSettings",),
}
"""The rpcs of GRPCInferenceService by category. All rpcs of grpc.health.v1.Health are `health`."""
CATEGORY = {rpc: category for category, rpcs in RPCS.items() for rpc in rpcs}
INFERENCE_PREFIX = f"/{pb.DESCRIPTOR.package}.GRPCInferenceService/"
HEALTH_PREFIX = "/grpc.health.v1.Health/"

_aio: Any = grpc.aio
Handler = Any
"""grpc.RpcMethodHandler"""


class Restrictions(_aio.ServerInterceptor):
    """The interceptor that checks every call before its handler runs."""

    def __init__(self, restrictions: Mapping[str, Restriction]) -> None:
        self._restrictions = restrictions

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        """The call's own handler, or one that refuses."""
        handler = await continuation(details)
        restriction = self._restrictions.get(category_of(details.method))
        if handler is None or restriction is None:
            return handler
        key = KEY_PREFIX + restriction.key
        if restriction.is_met(value for name, value in details.invocation_metadata if name == key):
            return handler
        return refusing(handler, f"This protocol is restricted, expecting header '{key}'")


def category_of(method: str) -> str:
    """The category of a method `/package.Service/Method`; "" if it has none."""
    if method.startswith(HEALTH_PREFIX):
        return "health"
    return CATEGORY.get(method.removeprefix(INFERENCE_PREFIX), "")


def refusing(handler: Handler, reason: str) -> Handler:
    """A handler of the same kind that ends the call at once."""

    async def refuse(_request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, reason)

    make: Any = {
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(refuse, handler.request_deserializer, handler.response_serializer)
