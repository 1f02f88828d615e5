"""What a gateway can be told. Bounds are per gateway unless their text says otherwise."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

import click

from gateway.restrictions import Restriction, parse_restrictions
from shared.contract.limits import GATEWAY_MEMORY_MIN, LIVE_MAX
from shared.contract.response_cache import parse_cache_config
from shared.origins import parse_origin
from shared.process.machine import available_bytes
from shared.settings import MetricsSettings, setting

INT32_MAX = (1 << 31) - 1
OWN_BYTES = 192 << 20
"""Memory of a gateway without any request: the interpreter, its libraries, their threads."""
MESSAGE_BYTES_MAX = 64 << 20
"""Default bound of one request: Triton's bound on HTTP bodies."""
IN_FLIGHT_BYTES_MAX = 1 << 30
"""Highest default for the bytes of requests in flight: Redis holds them too."""
RPC_BYTES = 128 << 10
"""Memory of an idle gRPC call: its metadata, its tasks, half a window of the transport."""
RPCS_MAX = 10_000
HttpParser = Literal["llhttp", "hypercorn"]

_int32 = partial(setting, minimum=0, maximum=INT32_MAX)
_share = partial(setting, 0, minimum=0)
"""A bound that is a share of another one, or of what the machine has, if it is not given (0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(MetricsSettings):
    """Addresses and bounds of the stateless edge."""

    host: str = setting("127.0.0.1", help="Address to listen on; 0.0.0.0 for every interface.", group="Addresses")
    http_port: int = setting(8000, help="Port of the v2 HTTP protocol; 0 picks a free one.", minimum=0, maximum=65535)
    grpc_port: int = setting(8001, help="Port of the v2 gRPC protocol; 0 picks a free one.", minimum=0, maximum=65535)
    metrics_port: int = setting(8002, help="Port of /metrics alone; 0 picks a free one.", minimum=0, maximum=65535)
    reuse_port: bool = setting(
        default=False,
        help="Whether the HTTP and the gRPC port are shared (SO_REUSEPORT): any number of gateways of one mesh and one "
        "user may listen on them on this machine, and the system spreads connections over them. Each still needs a "
        "metrics port of its own. On Linux alone.",
    )
    grpc_advertise: str = setting(
        "",
        help="host:port by which executors reach the gRPC port, for models that call other models; 'none': this "
        "gateway takes no calls. Without it: the address that the port listens on, or where that is every interface, "
        "the one by which this gateway reaches Redis.",
        unit="host:port",
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
    )
    http_parser: HttpParser = setting(
        "llhttp",
        help="What parses HTTP/1.1: llhttp, the C parser of Node.js, or Hypercorn with h11. With Hypercorn a small "
        "request takes more than twice the CPU.",
    )
    restricted_api: tuple[str, ...] = setting(
        (),
        help="Parts of the protocols that answer only to those who send a header: "
        "'<category>,<category>:<header>=<value>'. Categories: health, metadata, inference, shared-memory, "
        "model-config, model-repository, statistics, trace, logging, metrics, sequences. Holds for HTTP, for gRPC (the "
        "metadata key is triton-grpc-protocol-<header>), and for the metrics port (metrics, else statistics). May be "
        "repeated.",
        secret=True,
    )
    allow_load_overrides: bool = setting(
        default=False,
        help="Whether everybody may load models with a configuration and files of their own, that is, with code, where "
        "the gateway listens beyond loopback and the model repository is not restricted (--restricted-api). On a "
        "loopback address everybody may.",
    )
    allow_client_shm: bool = setting(
        default=False,
        help="Whether clients on this machine may place inputs and outputs in system shared memory: in files of "
        "/dev/shm that they name, which the gateway opens with its own rights.",
    )
    client_shm_prefix: str = setting(
        "", help="With --allow-client-shm: clients may register only keys that begin with this."
    )
    http_allowed_origin: tuple[str, ...] = setting(
        (),
        help="Origin of web pages that may use the HTTP port, for instance https://app.example.com, where a proxy "
        "serves them and this gateway under one name. No other origin's page may change anything. May be repeated.",
    )
    http_restricted_api: tuple[str, ...] = setting(
        (), help="Triton's option of that name: as --restricted-api, of the HTTP port alone.", secret=True
    )
    http_server_cert: str = setting(
        "", help="Certificate file (PEM) of the HTTP port, which then speaks TLS alone.", unit="file", group="TLS"
    )
    http_server_key: str = setting("", help="Private key of --http-server-cert (PEM).", unit="file")
    http_root_cert: str = setting(
        "",
        help="Authorities (PEM) that must have signed a client's certificate; without it, clients need none.",
        unit="file",
    )
    grpc_header_forward_pattern: str = setting(
        "",
        help="As --http-header-forward-pattern, of the metadata of gRPC calls.",
        group="Protocol",
    )
    grpc_restricted_protocol: tuple[str, ...] = setting(
        (), help="Triton's option of that name: as --restricted-api, of the gRPC port alone.", secret=True
    )
    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = setting(
        "none", help="Compression of answers to inference over gRPC: gzip at level low, deflate above."
    )
    grpc_use_ssl: bool = setting(default=False, help="Whether the gRPC port speaks TLS.", group="TLS")
    grpc_use_ssl_mutual: bool = setting(
        default=False, help="Whether gRPC clients must show a certificate, too; implies --grpc-use-ssl."
    )
    grpc_server_cert: str = setting("", help="Certificate file (PEM) of the gRPC port.", unit="file")
    grpc_server_key: str = setting("", help="Private key of --grpc-server-cert (PEM).", unit="file")
    grpc_root_cert: str = setting("", help="Authorities (PEM) that sign the certificates of gRPC clients.", unit="file")
    grpc_keepalive_time: int = _int32(
        7_200_000,
        help="A gRPC connection on which nothing happens is pinged after so long.",
        unit="ms",
        group="gRPC connections",
        minimum=1,
    )
    grpc_keepalive_timeout: int = _int32(
        20_000,
        help="Time in which the ping of a quiet gRPC connection must be answered.",
        unit="ms",
        minimum=1,
    )
    grpc_keepalive_permit_without_calls: bool = setting(
        default=False, help="Whether connections without a call are pinged."
    )
    grpc_http2_max_pings_without_data: int = _int32(2, help="Pings sent without data between them; 0 for any number.")
    grpc_http2_min_recv_ping_interval_without_data: int = _int32(
        300_000,
        help="The time that a client must let pass between two pings without data between them.",
        unit="ms",
    )
    grpc_http2_max_ping_strikes: int = _int32(
        2,
        help="How often a client may ping too early before its connection is closed; 0: as often as it likes.",
    )
    grpc_max_connection_age: int = _int32(
        0, help="Age at which a gRPC connection is asked to end; 0 for never.", unit="ms"
    )
    grpc_max_connection_age_grace: int = _int32(
        0,
        help="Time for the calls of a connection of --grpc-max-connection-age; 0 for as long as they take.",
        unit="ms",
    )
    memory_max: int = _share(
        help="Memory that the gateway's process may take. Near this bound the connections that keep most memory lose "
        "their calls; at the bound requests are refused with 503 / UNAVAILABLE. 0: half of what the machine, or the "
        "container, has. Other bounds whose default is 0 are shares of this one.",
        unit="bytes",
        group="Bounds",
    )
    grpc_max_input_size: int = _share(
        help="Largest gRPC message that is received, packed or not. 0: 64 MiB, less where --memory-max is below "
        "1.2 GiB. Triton has no bound below 2 GiB; Redis takes no value beyond 512 MiB.",
        unit="bytes",
    )
    grpc_max_concurrent_rpcs: int = _share(
        help="RPCs that are served at once, each stream as one; beyond it, and beyond seven eighths of what others "
        "leave of it for one client, callers get RESOURCE_EXHAUSTED. 0: 10000, less where --memory-max is below "
        "2.7 GiB.",
    )
    http_max_input_size: int = _share(
        help="Largest body of an HTTP request, after decompression. 0: 64 MiB, which is Triton's default, less where "
        "--memory-max is below 1.2 GiB.",
        unit="bytes",
    )
    http_max_connections: int = _share(
        help="Connections of the HTTP port at once. At the bound a new connection takes the place of the one that has "
        "been without a request for longest. Where all have requests, new ones are answered 503, but for health "
        "checks. 0: half of the open files that the system allows (ulimit -Hn), at most 4096.",
    )
    http_max_connections_per_client: int = _share(
        help="Connections of one client among these. A client is an IPv4 address, or an IPv6 network of 64 bits; "
        "behind a proxy all clients are one. 0: half of --http-max-connections.",
    )
    grpc_max_connections: int = _share(
        help="Connections of the gRPC port at once. At the bound a new connection takes the place of the one that has "
        "been without a call for longest; where all have calls, it is closed. One client may have seven eighths of "
        "them. 0: as --http-max-connections.",
        maximum=INT32_MAX - 1,
    )
    exit_timeout_secs: float = setting(
        25.0,
        help="How long accepted requests may take to be answered once the gateway is told to stop. Triton's default is "
        "30, after which orchestrators kill.",
        unit="s",
        group="Health",
        minimum=0.0,
    )
    strict_readiness: bool = setting(
        default=False,
        help="The gateway is ready only while every model is ready: no model failed, and none is being loaded. Triton "
        "does so by default; here one broken model would take every gateway of the mesh out of its load balancer.",
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
        help="Requests waiting for an answer; beyond it callers get 503 / UNAVAILABLE. An eighth of it is for steps "
        "that go on with their sequence alone. One client may have seven eighths of what the others leave.",
        group="Bounds",
        minimum=1,
    )
    max_bytes_in_flight: int = _share(
        help="Bytes of requests, together: HTTP bodies that are being received, what decoding bodies and gRPC messages "
        "takes, and inputs, parameters and ids of requests that wait for an answer. Beyond it callers get 503 / "
        "UNAVAILABLE; an eighth of it is for requests of up to 16 KiB alone. One client may have seven eighths of what "
        "the others leave. Redis holds the requests that wait, too. 0: a quarter of --memory-max, at most 1 GiB.",
        unit="bytes",
    )
    max_bytes_unread: int = _share(
        help="Bytes of answers that clients have not taken yet; beyond it the client that has taken nothing for "
        "longest loses its connection. 0: a quarter of --memory-max.",
        unit="bytes",
    )
    request_timeout_ms: int = setting(
        0,
        help="How long a request may wait for its answer when it names no timeout of its own; 0: as long as it takes.",
        unit="ms",
        minimum=0,
    )
    sequence_inflight_max: int = setting(
        1024,
        help="Open steps (accepted, not answered yet) of one sequence, over all gateways. A step beyond it is refused.",
        minimum=1,
    )
    early_step_wait_ms: int = setting(
        500,
        help="How long a step with a number (sequence_step) waits for the steps before it, where they are on their way "
        "over other connections or gateways. After that it is refused, as it is at once where more than 8 steps are "
        "missing. 0: it never waits.",
        unit="ms",
        minimum=0,
        maximum=60_000,
    )
    backlog_max: int = setting(
        10_000,
        help="Sequences of one model and shard that wait for their first slot, and stateless requests of one model "
        "version that wait, over all gateways. Beyond it a START, or a stateless request, is refused.",
        minimum=1,
    )
    live_max: int = setting(
        LIVE_MAX,
        help="Live sequences of one model and shard, over all gateways: with virtual slots there may be many more than "
        "slots. Beyond it a START is refused. About 1 KiB of Redis each, beside their state.",
        minimum=1,
    )

    def __post_init__(self) -> None:
        """Raises click.UsageError for texts that mean nothing, so that a process does not start with them."""
        checks: list[tuple[str, Callable[[], object]]] = [
            ("--restricted-api", lambda: self.restrictions),
            ("--http-restricted-api", lambda: self.http_restrictions),
            ("--grpc-restricted-protocol", lambda: self.grpc_restrictions),
            *(("--http-allowed-origin", partial(parse_origin, origin)) for origin in self.http_allowed_origin),
            ("--cache-config", lambda: parse_cache_config(self.cache_config)),
            ("--http-header-forward-pattern", lambda: self.header_forward_regex),
            ("--grpc-header-forward-pattern", lambda: self.metadata_forward_regex),
        ]
        for option, read in checks:
            try:
                read()
            except (ValueError, re.error) as error:
                raise click.UsageError(f"{option}: {error}") from error
        MetricsSettings.__post_init__(self)
        if self.reuse_port and sys.platform != "linux":
            raise click.UsageError("--reuse-port: only Linux spreads connections over processes that share a port")
        if self.reuse_port and not (self.http_port and self.grpc_port):
            raise click.UsageError("--reuse-port needs --http-port and --grpc-port: with 0 each would get another one")
        if 0 < self.memory_max < GATEWAY_MEMORY_MIN:
            raise click.UsageError(f"--memory-max: a gateway needs {GATEWAY_MEMORY_MIN >> 20}MiB at least")
        if bool(self.http_server_cert) != bool(self.http_server_key) or (
            self.http_root_cert and not self.http_server_cert
        ):
            raise click.UsageError("--http-server-cert and --http-server-key go together; --http-root-cert needs both")
        if self.grpc_tls and not (self.grpc_server_cert and self.grpc_server_key):
            raise click.UsageError("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
        if (self.grpc_server_cert or self.grpc_server_key or self.grpc_root_cert) and not self.grpc_tls:
            # Triton speaks plain text then, and its operator believes in TLS.
            raise click.UsageError("--grpc-server-cert, --grpc-server-key and --grpc-root-cert need --grpc-use-ssl")
        if self.grpc_use_ssl_mutual and not self.grpc_root_cert:
            raise click.UsageError("--grpc-use-ssl-mutual needs --grpc-root-cert")

    def bounded(self) -> Self:
        """With the bounds that are not given made shares of the process's memory."""
        memory_max = self.memory_max or max(GATEWAY_MEMORY_MIN, available_bytes() // 2)
        rest = memory_max - OWN_BYTES
        message = min(MESSAGE_BYTES_MAX, rest // 16)
        return dataclasses.replace(
            self,
            memory_max=memory_max,
            # Only a quarter, because they exist several times: received, decoded, and encoded for Redis.
            max_bytes_in_flight=self.max_bytes_in_flight or min(IN_FLIGHT_BYTES_MAX, rest // 4),
            max_bytes_unread=self.max_bytes_unread or rest // 4,
            grpc_max_input_size=self.grpc_max_input_size or message,
            http_max_input_size=self.http_max_input_size or message,
            grpc_max_concurrent_rpcs=self.grpc_max_concurrent_rpcs or min(RPCS_MAX, rest // 2 // RPC_BYTES),
        )

    @property
    def restrictions(self) -> dict[str, Restriction]:
        """What closes parts of every port, by category."""
        return parse_restrictions(self.restricted_api)

    @property
    def http_restrictions(self) -> dict[str, Restriction]:
        return parse_restrictions((*self.restricted_api, *self.http_restricted_api))

    @property
    def grpc_restrictions(self) -> dict[str, Restriction]:
        return parse_restrictions((*self.restricted_api, *self.grpc_restricted_protocol))

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
        return self.grpc_use_ssl or self.grpc_use_ssl_mutual
