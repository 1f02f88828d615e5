"""What both shells have in common: arguments, and what is asked without waiting."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import UnionType
from typing import Any, Generic, TypeVar, cast

import grpc
from tritonclient.grpc import service_pb2_grpc

from seqmesh_client.conversation import Conversation, Mesh
from seqmesh_client.delivery import Patience
from seqmesh_client.token import Place

USUAL_PATIENCE = Patience()
PING_S = 360
"""After so long without a word a connection with calls is pinged. Gateways allow a ping every 300 s, as Triton does."""
SILENT_S = 20
"""A gateway whose machine is lost says nothing of it: its connection ends when nothing is acknowledged for so long."""
CHANNEL_OPTIONS = (
    # Without these bounds gRPC's back-off grows to minutes, in which a restarted gateway would not be found.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # With these two gRPC sets TCP_USER_TIMEOUT, too: what is sent must be acknowledged within the second one.
    ("grpc.keepalive_time_ms", PING_S * 1000),
    ("grpc.keepalive_timeout_ms", SILENT_S * 1000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Clients of one process share no connection: what breaks one leaves the others alone.
    ("grpc.use_local_subchannel_pool", 1),
)
GATEWAY = re.compile(r"(\[[^/\s]+\]|[^:/\[\]\s]+):[0-9]+|(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):\S+")
"""host:port, or an address with one of gRPC's own schemes. gRPC would take any other text for the name of a host, and
look for one without a port at 443."""
PORT = re.compile(r"(?!unix|vsock).*:([0-9]+)")
MAX_PORT = 65535
HEADER_NAME = re.compile(r"[0-9a-z_.-]+")
CLOSED = "the client was closed: another one goes on with its sequences, by resume(sequence.token)"
ELSEWHERE = (
    "the client belongs to the process, and the event loop, that used it first: make another one here, which goes on "
    "with its sequences by resume(sequence.token)"
)
HEADER_TEXT = re.compile(r"[ -~]*")
ChannelT = TypeVar("ChannelT")


class GatewayChannels(Generic[ChannelT]):
    """The gateways of a client.

    urls         host:port of the gateways' gRPC; sequences are spread over them
    patience     how long to wait, and when to repeat
    strict       True: a server that does not number steps is refused (NotNumbered). False: each step is sent to it once
    credentials  of the channels; None: without TLS
    headers      sent with every call, by name or in pairs; names have no case
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        patience: Patience = USUAL_PATIENCE,
        strict: bool = True,
        credentials: grpc.ChannelCredentials | None = None,
        headers: Mapping[str, str | bytes] | Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        if not urls or isinstance(urls, str | bytes | int) or not (gateways := tuple(urls)):
            raise ValueError('urls is a list of gateways: ["localhost:8001"]')
        for one in gateways:
            check_gateway(one)
        check_type("patience", patience, Patience, "Patience(step_s=60)")
        check_type("credentials", credentials, grpc.ChannelCredentials | None, "grpc.ssl_channel_credentials()")
        self.mesh = Mesh(gateways, patience, strict, {}, {})
        try:
            pairs = [(name, value) for name, value in (headers.items() if isinstance(headers, Mapping) else headers)]
        except (TypeError, ValueError):
            raise TypeError('headers is a dict, or pairs: {"seqmesh-tenant": "acme"}') from None
        self.headers = tuple(header_of(name, value) for name, value in pairs)
        self.channels: dict[int, ChannelT] = {}
        self.is_closed = False
        self._credentials = credentials
        self._home: tuple[int, object] | None = None

    def caller(self) -> tuple[int, object]:
        """Who calls now, by process and event loop: gRPC's connections serve nobody else."""
        return os.getpid(), None

    def check_caller(self) -> None:
        """Raises RuntimeError in a forked process, or in another event loop: gRPC would be silent there, or obscure."""
        caller = self.caller()
        self._home = self._home or caller
        if caller != self._home:
            raise RuntimeError(ELSEWHERE)

    def is_forked(self) -> bool:
        """Whether this process is a fork of the one whose connections these are. That one goes on with its sequences,
        and gRPC would wait here for ever for a thread that it has there.
        """
        return self._home is not None and self._home[0] != os.getpid()

    def stub(self, gateway: int, insecure: Callable[..., ChannelT], secure: Callable[..., ChannelT]) -> Any:
        """The calls of a gateway. Opens its channel at the first time. Raises RuntimeError if the client was closed."""
        if self.is_closed:
            raise RuntimeError(CLOSED)
        if gateway not in self.channels:
            url = self.mesh.gateways[gateway]
            self.channels[gateway] = (
                insecure(url, CHANNEL_OPTIONS)
                if self._credentials is None
                else secure(url, self._credentials, CHANNEL_OPTIONS)
            )
        return cast(Any, service_pb2_grpc).GRPCInferenceServiceStub(self.channels[gateway])


def check_gateway(url: Any) -> None:
    """Raises ValueError for what gRPC would take for another host, or for another port: it takes ports modulo 65536."""
    if not isinstance(url, str) or not GATEWAY.fullmatch(url):
        raise ValueError(f"'{url}' is no gateway: give host:port of its gRPC, without a scheme and without a path")
    port = PORT.fullmatch(url)
    if port is not None and int(port[1]) > MAX_PORT:
        raise ValueError(f"'{url}' is no gateway: there are ports up to {MAX_PORT}")


def check_type(name: str, value: object, kind: type | UnionType, example: str) -> None:
    """Raises TypeError for a value of another kind, with an example of a right one."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}={example} is right, not a value of type {type(value).__name__}")


def header_of(name: Any, value: Any) -> tuple[str, str | bytes]:
    """A header as gRPC sends it, or ValueError, or TypeError. The value, which may be a secret, is not in the text."""
    if not isinstance(name, str) or not HEADER_NAME.fullmatch(name.lower()):
        raise ValueError(f"'{name}' is no name of a header: letters, digits, '-', '_' and '.'")
    if not isinstance(value, bytes if name.lower().endswith("-bin") else str | bytes):
        raise TypeError(
            f"the value of header '{name}' is of type {type(value).__name__}: give a text, or bytes for a '-bin'"
        )
    text = value if isinstance(value, str) else value.decode("latin-1")
    if not name.lower().endswith("-bin") and not HEADER_TEXT.fullmatch(text):
        raise ValueError(
            f"the value of header '{name}' has a line's end, or another character that is no printable ASCII"
        )
    return name.lower(), value


ClientT = TypeVar("ClientT", bound=GatewayChannels[Any])


class OneSequence(Generic[ClientT]):
    """What is known of a sequence without asking the mesh."""

    def __init__(self, client: ClientT, place: Place) -> None:
        self._client = client
        self._conversation = Conversation(client.mesh, place)

    def _turn(self, passed_over: int | None = None) -> AbstractContextManager[None]:
        """As `Conversation.turn`, for those whom the client's connections serve."""
        self._client.check_caller()
        return self._conversation.turn(passed_over)

    @property
    def id(self) -> int | str:
        """The correlation id."""
        return self._conversation.place.sequence

    @property
    def answered(self) -> int:
        """How many steps have an outcome: the next one without is `answered` + 1."""
        return self._conversation.delivery.answered

    def hang_up(self) -> None:
        """Closes the connection alone. The next call opens another one."""
        self._conversation.hang_up()

    @property
    def token(self) -> str:
        """The present place, for `resume` in this process or another one. Short ASCII; holds no inputs."""
        return self._conversation.token()
