"""What a gateway can be told. Bounds are per gateway unless their text says otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass

import click

from gateway.restrictions import parse_restrictions
from shared.settings import MetricsSettings, setting


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files of TLS, PEM. root: authorities of client certificates, which are then required; "" for none."""

    certificate: str
    key: str
    root: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(MetricsSettings):
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
    server_id: str = setting(
        "triton",
        help="Name of the server in its metadata. Clients written for Triton compare it with Triton's.",
        group="Protocol",
    )
    http_header_forward_pattern: str = setting(
        "",
        help="Regular expression: HTTP headers whose names it finds become string parameters of the request. Names are "
        "compared without regard to case, and arrive in lower case.",
        group="Protocol",
    )
    http_restricted_api: tuple[str, ...] = setting(
        (),
        help="Parts of the HTTP protocol that answer only to those who send a header: "
        "'<category>,<category>:<header>=<value>'. Categories: health, metadata, inference, shared-memory, "
        "model-config, model-repository, statistics, trace, logging. May be repeated.",
        group="Protocol",
        secret=True,
    )
    http_server_cert: str = setting(
        "", help="Certificate file (PEM) of the HTTP port, which then speaks TLS alone.", unit="file", group="TLS"
    )
    http_server_key: str = setting("", help="The certificate's private key (PEM).", unit="file", group="TLS")
    http_root_cert: str = setting(
        "",
        help="Authorities (PEM) that must have signed a client's certificate; without it, clients need none.",
        unit="file",
        group="TLS",
    )
    http_max_input_size: int = setting(
        64 << 20,
        help="Largest request body, after decompression, and largest gRPC message. Triton's default is the same.",
        unit="bytes",
        group="Bounds",
        minimum=1,
    )
    strict_readiness: bool = setting(
        default=False,
        help="Say ready only while every model is: none that failed, none on its way. Triton does so by default; of a "
        "mesh one broken model would take every gateway out of its load balancer.",
        group="Health",
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

    def __post_init__(self) -> None:
        """Raises click.UsageError for texts that mean nothing, so that a process does not start with them."""
        try:
            parse_restrictions(self.http_restricted_api)
        except ValueError as error:
            raise click.UsageError(f"--http-restricted-api: {error}") from error
        MetricsSettings.__post_init__(self)
        try:
            re.compile(self.http_header_forward_pattern)
        except re.error as error:
            raise click.UsageError(f"--http-header-forward-pattern: {error}") from error
        if bool(self.http_server_cert) != bool(self.http_server_key) or (
            self.http_root_cert and not self.http_server_cert
        ):
            raise click.UsageError("--http-server-cert and --http-server-key go together; --http-root-cert needs both")

    @property
    def header_forward_regex(self) -> re.Pattern[str] | None:
        """What `http_header_forward_pattern` means; None for nothing."""
        pattern = self.http_header_forward_pattern
        return re.compile(pattern, re.IGNORECASE) if pattern else None

    @property
    def http_certificate(self) -> Certificate | None:
        """What the HTTP port shows and asks for; None without TLS."""
        if not self.http_server_cert:
            return None
        return Certificate(self.http_server_cert, self.http_server_key, self.http_root_cert)
