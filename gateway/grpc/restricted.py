"""Refuses calls to restricted parts of the gRPC protocol that lack the secret metadata key.

Options `--restricted-api` and `--grpc-restricted-protocol`. The metadata key is the option's key with Triton's prefix.
A call is refused before its message is read.

Source: triton-spec 5.2; Triton server, `grpc_server.cc`, restricted protocols.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.grpc.pb import pb
from gateway.grpc.wire.opening import Opening
from gateway.restrictions import Restriction
from shared.contract.errors import UnavailableError

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


def refuse_restricted(opening: Opening, restrictions: Mapping[str, Restriction]) -> None:
    """Raises UnavailableError when a call lacks the key of its category. restrictions: by category"""
    restriction = restrictions.get(category_of(opening.path)) if restrictions else None
    if restriction is None:
        return
    key = KEY_PREFIX + restriction.key
    if not restriction.is_met(value for name, value in opening.metadata if name == key):
        raise UnavailableError(f"This protocol is restricted, expecting header '{key}'")


def category_of(method: str) -> str:
    """The category of a method `/package.Service/Method`; "" if it has none."""
    if method.startswith(HEALTH_PREFIX):
        return "health"
    return CATEGORY.get(method.removeprefix(INFERENCE_PREFIX), "")
