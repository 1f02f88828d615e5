"""Connections to Redis.

If the URL names Sentinels, each new connection asks them for the primary, and checks that the server calls itself one.
So does each new connection to a home of a Cluster, which asks the Cluster's nodes (`shared.store.connections.cluster`).
When a server ceases to be the primary, a connection leaves it with the first command that it refuses; or the server
cuts its clients off, as Sentinels tell it to.

Every service has a few connections with one use each: blocking reads must not hold up the commands of others. All other
commands share a pool, and wait until one of its connections is free.
Lost connections are retried with jittered back-off. The scripts recognise what a lost call had already done (each is
safe to repeat, see `shared.store.scripts`).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import FullJitterBackoff, NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError

from shared.contract.errors import UnavailableError
from shared.process.addresses import authority
from shared.store.commands import Redis
from shared.store.connections.cluster import Node, Nodes
from shared.store.connections.cluster_redis import ClusterRedis
from shared.store.connections.discovery import Discovery
from shared.store.connections.mending import MendingRedis
from shared.store.connections.redis_py import (
    CONNECTION_LOST,
    CONNECTIONS,
    DISCOVERED_CONNECTIONS,
    LOST_OR_REFUSED,
    REPLY_TIMEOUT_S,
    DiscoveredConnection,
)
from shared.store.connections.redis_url import RedisEndpoint, parse_redis_url, url_of_node
from shared.store.connections.sentinels import sentinels
from shared.store.connections.server_run import ServerRun
from shared.store.keyspace import Keyspace
from shared.store.reading import clock_ms

RETRIES = 8
"""Times a command is repeated on a broken connection: with the back-off below, 2 to 6 seconds of Redis restart."""
BACKOFF_CAP_S = 2.0
BACKOFF_BASE_S = 0.02
LONGEST_PAUSE_FROM = 10
"""Failures in a row from which on pauses grow no more: by then `BACKOFF_CAP_S` bounds them."""
CONNECT_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 64
"""Of a pool. A process that serves hundreds of models has hundreds of commands under way when it starts."""
KEEPALIVE = {
    option: value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000))
    if (option := getattr(socket, name, None)) is not None
}
"""A silent host counts as lost after about 20 s: probes every 3 s after 10 s of silence; unacknowledged data for 15 s.
Options that this system does not know are left out.
"""
NOT_IN_A_NAME = re.compile(r"[^!-~]")
"""Characters that Redis does not allow in a connection's name."""


RUN = re.compile(rb"^(?:run_id|master_replid):(\w+)", re.MULTILINE)


def connect(
    url: str,
    *,
    retries: int = RETRIES,
    name: str = "",
    timeout_ms: int = round(REPLY_TIMEOUT_S * 1000),
    run: ServerRun | None = None,
    keys: Keyspace | None = None,
) -> Redis:
    """A client with a pool of its own; bytes in, bytes out.

    retries     0 for calls that must not be repeated automatically
    name        of this process, which CLIENT LIST shows for its connections
    timeout_ms  how long the server may take to answer, and how long a command may wait for a connection
    run         the server's run that the connections are bound to; None: they are bound to none
    keys        of the mesh: tell a Cluster's homes from the beginning; None: each is found with its first key
    """
    address = parse_redis_url(url)
    options: dict[str, Any] = {
        **_socket_options(address.server),
        "client_name": NOT_IN_A_NAME.sub("-", name) or None,
        "retry": Retry(FullJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S), retries),
        "retry_on_error": list(CONNECTION_LOST),
    }

    def client(discovery: Discovery | None, home: str = "") -> MendingRedis:
        kind = CONNECTIONS[address.server.way]
        own: dict[str, Any] = {**options, "redis_connect_func": partial(_greet, timeout_ms / 1000, run, home)}
        if discovery is not None:
            kind, own["discovery"] = DISCOVERED_CONNECTIONS[address.server.way], discovery
        pool: Any = BlockingConnectionPool(CONNECTIONS_MAX, timeout_ms / 1000, connection_class=kind, **own)
        return cast(MendingRedis, MendingRedis.from_pool(pool))

    if address.nodes:
        nodes = Nodes(address.nodes, partial(_node_connection, address.server))
        cluster = ClusterRedis(lambda tag: client(nodes.holder(tag), tag))
        cluster.know(keys.bases() if keys is not None else ())
        return cast(Redis, cluster)
    asked = [partial(_asked_connection, endpoint) for endpoint in address.sentinels]
    return cast(Redis, client(sentinels(address.service, asked) if asked else None))


async def server_urls(url: str) -> Mapping[str, str]:
    """A URL of each server by its address; of an only one, by whatever way, its own by "". Raises redis-py's
    ConnectionError if no node of a Cluster tells.
    """
    address = parse_redis_url(url)
    if not address.nodes:
        return {"": url}
    nodes = Nodes(address.nodes, partial(_node_connection, address.server))
    return {authority(*node): url_of_node(url, *node) for node in sorted(await nodes.with_slots())}


def _socket_options(endpoint: RedisEndpoint) -> dict[str, Any]:
    """Options of every connection.

    A host that is gone is found out by the kernel, and one that is silent by `BoundedConnection`. redis-py's own socket
    timeout would wrap each write in asyncio.wait_for, which in Python 3.11 can swallow a cancellation: a task that is
    to end would go on for ever.

    Nothing is told of redis-py (`driver_info`): it would send that in two writes without a look at what has come. A
    server that says why it takes no more clients has closed the connection by then, and the reason would be lost.
    """
    keepalive = {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    return {
        "decode_responses": False,
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "driver_info": None,
        **({} if endpoint.way == "unix" else keepalive),
        **endpoint.options,
    }


def _asked_connection(endpoint: RedisEndpoint, **where: Any) -> Any:
    """A connection to one who knows where a primary is."""
    connection = CONNECTIONS[endpoint.way](**_socket_options(endpoint), **where, retry=Retry(NoBackoff(), 0))
    connection.reply_timeout_s = CONNECT_TIMEOUT_S
    return connection


def _node_connection(endpoint: RedisEndpoint, node: Node) -> Any:
    host, port = node
    return _asked_connection(endpoint, host=host, port=port)


async def _greet(reply_timeout_s: float, run: ServerRun | None, home: str, connection: Any) -> None:
    """Prepares a new connection before it is used."""
    connection.reply_timeout_s = reply_timeout_s
    try:
        await connection.on_connect()
    except AuthenticationError as refusal:
        if not isinstance(connection, DiscoveredConnection):
            raise
        # One of several servers may lack a user that the others have.
        raise AuthenticationError(f"{connection.host}:{connection.port}: {refusal}") from refusal
    if isinstance(connection, DiscoveredConnection):
        await connection.verify()
    if run is not None:
        run.meet(await _run(connection), cast("Any", connection), home)


async def _run(connection: Any) -> str:
    """The server's run, for `ServerRun`. The run changes with a restart, and with a time as a replica: then the server
    holds another server's data, although its process is the same.
    """
    await connection.send_command("INFO", "server", "replication")
    try:
        info: bytes = await connection.read_response()
    except NoPermissionError:
        return ""
    return b" ".join(RUN.findall(info)).decode()


@contextmanager
def redis_needed(what: str, done: str) -> Generator[None]:
    """Errors of Redis within the block become UnavailableError: Redis, which holds `what`, cannot be `done`."""
    try:
        yield
    except LOST_OR_REFUSED as lost:
        raise UnavailableError(f"Redis, which holds the {what}, cannot be {done}: {lost}") from lost


def pause_s(failures: int) -> float:
    """How long to wait before the next try, s, after so many failures in a row: at random, because many processes lose
    a server at the same moment.
    """
    # Redis may stay away for an hour, and 2 to the power of 1024 is no float any more.
    return FullJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S).compute(min(failures, LONGEST_PAUSE_FROM))


async def redis_now_ms(redis: Redis) -> int:
    """The clock of the server, in ms. It stamps stream entries, and is the clock by which machines compare times."""
    return clock_ms(await redis.time())
