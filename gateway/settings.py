"""What a gateway can be told. Bounds are per gateway unless their text says otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import click

from gateway.restrictions import parse_restrictions
from shared.limits import LIVE_MAX
from shared.response_cache import parse_cache_config
from shared.settings import MetricsSettings, setting

INT32_MAX = (1 << 31) - 1


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
    grpc_header_forward_pattern: str = setting(
        "",
        help="As --http-header-forward-pattern, of the metadata of gRPC calls.",
        group="Protocol",
    )
    grpc_restricted_protocol: tuple[str, ...] = setting(
        (),
        help="As --http-restricted-api, of the gRPC protocol; the metadata key is triton-grpc-protocol-<header>.",
        group="Protocol",
        secret=True,
    )
    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = setting(
        "none",
        help="Compression of answers to inference over gRPC: gzip at level low, deflate above.",
        group="Protocol",
    )
    grpc_use_ssl: bool = setting(default=False, help="Whether the gRPC port speaks TLS.", group="TLS")
    grpc_use_ssl_mutual: bool = setting(
        default=False, help="Whether gRPC clients must show a certificate, too; implies --grpc-use-ssl.", group="TLS"
    )
    grpc_server_cert: str = setting("", help="Certificate file (PEM) of the gRPC port.", unit="file", group="TLS")
    grpc_server_key: str = setting("", help="The certificate's private key (PEM).", unit="file", group="TLS")
    grpc_root_cert: str = setting(
        "", help="Authorities (PEM) that sign the certificates of gRPC clients.", unit="file", group="TLS"
    )
    grpc_keepalive_time: int = setting(
        7_200_000,
        help="A gRPC connection on which nothing happens is pinged after so long.",
        unit="ms",
        group="gRPC connections",
        minimum=1,
        maximum=INT32_MAX,
    )
    grpc_keepalive_timeout: int = setting(
        20_000,
        help="The time in which such a ping must be answered.",
        unit="ms",
        group="gRPC connections",
        minimum=1,
        maximum=INT32_MAX,
    )
    grpc_keepalive_permit_without_calls: bool = setting(
        default=False, help="Whether connections without a call are pinged.", group="gRPC connections"
    )
    grpc_http2_max_pings_without_data: int = setting(
        2,
        help="Pings sent without data between them; 0 for any number.",
        group="gRPC connections",
        minimum=0,
        maximum=INT32_MAX,
    )
    grpc_http2_min_recv_ping_interval_without_data: int = setting(
        300_000,
        help="The time that a client must let pass between two pings without data between them.",
        unit="ms",
        group="gRPC connections",
        minimum=0,
        maximum=INT32_MAX,
    )
    grpc_http2_max_ping_strikes: int = setting(
        2,
        help="How often a client may ping too early before its connection is closed; 0: as often as it likes.",
        group="gRPC connections",
        minimum=0,
        maximum=INT32_MAX,
    )
    grpc_max_connection_age: int = setting(
        0,
        help="Age at which a gRPC connection is asked to end; 0 for never.",
        unit="ms",
        group="gRPC connections",
        minimum=0,
        maximum=INT32_MAX,
    )
    grpc_max_connection_age_grace: int = setting(
        0,
        help="Time for the calls of such a connection; 0 for as long as they take.",
        unit="ms",
        group="gRPC connections",
        minimum=0,
        maximum=INT32_MAX,
    )
    grpc_max_input_size: int = setting(
        500 << 20,
        help="Largest gRPC message that is received. Triton has no bound below 2 GiB; Redis takes no value beyond "
        "512 MiB.",
        unit="bytes",
        group="Bounds",
        minimum=1,
    )
    grpc_max_concurrent_rpcs: int = setting(
        10_000,
        help="RPCs that are served at once, each stream as one; beyond it callers get RESOURCE_EXHAUSTED. gRPC "
        "receives messages whole before anybody sees them: together they take no more than this many times "
        "--grpc-max-input-size.",
        group="Bounds",
        minimum=1,
    )
    http_max_input_size: int = setting(
        64 << 20,
        help="Largest body of an HTTP request, after decompression. Triton's default is the same.",
        unit="bytes",
        group="Bounds",
        minimum=1,
    )
    exit_timeout_secs: float = setting(
        25.0,
        help="How long what was accepted may take to be answered once the gateway is told to stop. Triton's default is "
        "30, after which orchestrators kill.",
        unit="s",
        group="Health",
        minimum=0.0,
    )
    strict_readiness: bool = setting(
        default=False,
        help="Say ready only while every model is: none that failed, none on its way. Triton does so by default; of a "
        "mesh one broken model would take every gateway out of its load balancer.",
        group="Health",
    )
    cache_config: str = setting(
        "",
        help="Triton's option of that name: 'local,size=<bytes>' lets stateless models with response_cache enabled "
        "answer equal requests from a cache in Redis. The size is that of each shard's cache; a model's answers lie in "
        "one shard. Give it to all gateways alike.",
        group="Response cache",
    )
    max_requests_in_flight: int = setting(
        10_000,
        help="Requests waiting for an answer; beyond it callers get 503 / UNAVAILABLE.",
        group="Bounds",
        minimum=1,
    )
    max_bytes_in_flight: int = setting(
        1 << 30,
        help="Bytes of HTTP bodies that are being received, and of the input tensors of requests that wait for an "
        "answer, together; beyond it callers get 503 / UNAVAILABLE. Redis holds those that wait, too.",
        unit="bytes",
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
        help="Sequences of one model and shard that wait for their first slot, over all gateways; beyond it a START is "
        "refused.",
        group="Bounds",
        minimum=1,
    )
    live_max: int = setting(
        LIVE_MAX,
        help="Live sequences of one model and shard, over all gateways: with virtual slots there may be many more than "
        "slots. Beyond it a START is refused. About 1 KiB of Redis each, beside their state.",
        group="Bounds",
        minimum=1,
    )

    def __post_init__(self) -> None:
        """Raises click.UsageError for texts that mean nothing, so that a process does not start with them."""
        for option, texts in (
            ("--http-restricted-api", self.http_restricted_api),
            ("--grpc-restricted-protocol", self.grpc_restricted_protocol),
        ):
            try:
                parse_restrictions(texts)
            except ValueError as error:
                raise click.UsageError(f"{option}: {error}") from error
        MetricsSettings.__post_init__(self)
        try:
            parse_cache_config(self.cache_config)
        except ValueError as error:
            raise click.UsageError(f"--cache-config: {error}") from error
        for option, pattern in (
            ("--http-header-forward-pattern", self.http_header_forward_pattern),
            ("--grpc-header-forward-pattern", self.grpc_header_forward_pattern),
        ):
            try:
                re.compile(pattern)
            except re.error as error:
                raise click.UsageError(f"{option}: {error}") from error
        if bool(self.http_server_cert) != bool(self.http_server_key) or (
            self.http_root_cert and not self.http_server_cert
        ):
            raise click.UsageError("--http-server-cert and --http-server-key go together; --http-root-cert needs both")
        if self.grpc_tls and not (self.grpc_server_cert and self.grpc_server_key):
            raise click.UsageError("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
        if self.grpc_use_ssl_mutual and not self.grpc_root_cert:
            raise click.UsageError("--grpc-use-ssl-mutual needs --grpc-root-cert")

    @property
    def header_forward_regex(self) -> re.Pattern[str] | None:
        """What `http_header_forward_pattern` means; None for nothing."""
        pattern = self.http_header_forward_pattern
        return re.compile(pattern, re.IGNORECASE) if pattern else None

    @property
    def metadata_forward_regex(self) -> re.Pattern[str] | None:
        """What `grpc_header_forward_pattern` means; None for nothing."""
        pattern = self.grpc_header_forward_pattern
        return re.compile(pattern, re.IGNORECASE) if pattern else None

    @property
    def grpc_tls(self) -> bool:
        """Whether the gRPC port speaks TLS."""
        return self.grpc_use_ssl or self.grpc_use_ssl_mutual

    @property
    def http_certificate(self) -> Certificate | None:
        """What the HTTP port shows and asks for; None without TLS."""
        if not self.http_server_cert:
            return None
        return Certificate(self.http_server_cert, self.http_server_key, self.http_root_cert)
