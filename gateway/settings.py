"""What a gateway can be told. Bounds are per gateway unless their text says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from shared.settings import CommonSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(CommonSettings):
    """Addresses and bounds of the stateless edge."""

    host: str = setting("127.0.0.1", help="Address to listen on; 0.0.0.0 for every interface.", group="Addresses")
    http_port: int = setting(
        8000, help="Port of the v2 HTTP protocol; 0 picks a free one.", group="Addresses", minimum=0, maximum=65535
    )
    grpc_port: int = setting(
        8001, help="Port of the v2 gRPC protocol; 0 picks a free one.", group="Addresses", minimum=0, maximum=65535
    )
    metrics_port: int = setting(
        8002, help="Port of /metrics alone; 0 picks a free one.", group="Addresses", minimum=0, maximum=65535
    )
    http_max_input_size: int = setting(
        64 << 20,
        help="Largest request body, after decompression, and largest gRPC message. Triton's default is the same.",
        unit="bytes",
        group="Bounds",
        minimum=1,
    )
    max_requests_in_flight: int = setting(
        10_000,
        help="Requests waiting for an answer; beyond it callers get 503 / UNAVAILABLE.",
        group="Bounds",
        minimum=1,
    )
    request_timeout_ms: int = setting(
        0,
        help="How long a request may wait for its answer when it names no timeout of its own; 0: as long as it takes.",
        unit="ms",
        group="Bounds",
        minimum=0,
    )
    sequence_inflight_max: int = setting(
        1024, help="Accepted, unanswered steps of one sequence, over all gateways.", group="Bounds", minimum=1
    )
    backlog_max: int = setting(
        10_000,
        help="Sequences of one model that wait for a slot, over all gateways; beyond it a START is refused.",
        group="Bounds",
        minimum=1,
    )
