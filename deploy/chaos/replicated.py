"""A primary, its replicas and Sentinels: real processes on loopback, to be killed, frozen and left behind. Without
replicas it is one server alone.

For chaos and for tests. The bundled server has both roles, so nothing else has to be installed. Servers and Sentinels
have passwords of their own. Calls block, and a process dies with the thread that started it (`deploy.local.tether`).
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from deploy.local.embedded import find_server, free_port, log_tail
from deploy.local.tether import tethered

SERVICE = "mesh"
HOST = "127.0.0.1"
READY_TIMEOUT_S = 30.0
CHANGE_TIMEOUT_S = 60.0
"""A failover takes two seconds, and a new attempt after one that failed ten."""
POLL_S = 0.05
START_ATTEMPTS = 3
REFUSING = 9
"""More replicas than there are."""
PAUSE_MS = 2000
SENTINELS = 3
QUORUM = 2
PORT_TAKEN = "Address already in use"
PERIODS_MS = {"info-period": 500, "publish-period": 200, "ask-period": 200}
"""What Sentinels do every 10 s, 2 s and 1 s otherwise: it would take ten seconds until an old primary that is back has
become a replica, or until the next failover."""
FAILOVER_TIMEOUT_MS = 2000
"""No failover begins sooner than twice this after the one before it."""


class Node:
    """One process: a server or a Sentinel. It has its own configuration file, because it may rewrite it."""

    def __init__(self, directory: Path, port: int, password: str, flags: list[str]) -> None:
        self.port = port
        self.password = password
        self.config = directory / "node.conf"
        self.log_path = directory / "node.log"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed; it may be frozen."""
        return self._process is not None

    @contextmanager
    def client(self) -> Generator[Any]:
        """A client of this very process; replies are texts. Typed loosely: redis-py's types are unions."""
        with redis.Redis(
            host=HOST,
            port=self.port,
            password=self.password,
            decode_responses=True,
            socket_timeout=2.0,
            # Whoever waits asks again by itself; redis-py would pause for seconds at each question to a dead process.
            retry=Retry(NoBackoff(), 0),
        ) as client:
            yield client

    def order(self, *words: object) -> None:
        """Sends a command that may come twice, again and again until it is taken: a Sentinel that changes a server's
        role cuts off whoever is connected to it."""

        def taken() -> bool:
            try:
                with self.client() as client:
                    client.execute_command(*words)
            except (redis.ConnectionError, redis.TimeoutError):
                return False
            return True

        until(taken, f"{self.address} takes {words[0]}", READY_TIMEOUT_S)

    def start(self) -> None:
        """Returns at once; the data is as it was."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                tethered([str(find_server()), str(self.config), *self._flags], signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Ends the process as a crash would. No effect if it has ended."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Stops the process in order: a primary ends when its replicas have all its data."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()

    def send(self, sent: signal.Signals) -> None:
        """SIGSTOP freezes it, SIGCONT wakes it. Only while it runs."""
        assert self._process is not None, f"{self.address} does not run"
        self._process.send_signal(sent)

    def answers(self) -> bool:
        """Whether it takes commands."""
        try:
            with self.client() as client:
                return bool(client.ping())
        except (RedisError, OSError):
            return False

    def info(self, name: str) -> Any:
        """A field of its INFO; None while it does not answer."""
        try:
            with self.client() as client:
                return client.info("replication").get(name)
        except (RedisError, OSError):
            return None


def node(directory: Path, port: int, password: str, options: Mapping[str, str], flags: list[str]) -> Node:
    """One process, not started yet, in a directory of its own."""
    directory = directory.resolve()
    directory.mkdir(parents=True, mode=0o700)
    given = {"bind": HOST, "port": str(port), "dir": f'"{directory}"', **options}
    made = Node(directory, port, password, flags)
    made.config.write_text("".join(f"{option} {value}\n" for option, value in given.items()))
    return made


class ReplicatedRedis:
    """All of them. A context manager: started on entry, gone on exit.

    replicas      0: one server alone, without Sentinels
    min_replicas  min-replicas-to-write of every server
    down_after_ms  without an answer for so long a primary is replaced
    """

    def __init__(self, directory: Path, *, replicas: int = 1, min_replicas: int = 0, down_after_ms: int = 1000) -> None:
        self._directory = directory
        self._replicas = replicas
        self._min_replicas = min_replicas
        self._down_after_ms = down_after_ms
        self.servers: list[Node] = []
        self.sentinels: list[Node] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL by which a client asks the Sentinels for the present primary; that of a server alone."""
        if not self.sentinels:
            return self.url_at(self.servers[0].address)
        hosts = ",".join(sentinel.address for sentinel in self.sentinels)
        secret = self.sentinels[0].password
        return f"redis+sentinel://:{self.servers[0].password}@{hosts}/{SERVICE}/0?sentinel_password={secret}"

    def url_at(self, address: str) -> str:
        """The URL of the first server, when it is reached there: through a proxy."""
        return f"redis://:{self.servers[0].password}@{address}/0"

    def start(self) -> None:
        """Returns when the first server is the primary, its replicas are in step, and the Sentinels know of all."""
        for attempt in range(1, START_ATTEMPTS + 1):
            self._make(attempt)
            try:
                self._start()
            except TimeoutError:
                logs = [log_tail(node.log_path) for node in (*self.servers, *self.sentinels)]
                self.stop()
                if attempt == START_ATTEMPTS or not any(PORT_TAKEN in log for log in logs):
                    raise
            else:
                return

    def stop(self) -> None:
        """Kills all processes: their data is not needed any more."""
        for node in (*self.sentinels, *self.servers):
            node.kill()

    def primary(self) -> Node:
        """The server that most Sentinels name as primary. Waits until they agree. A server alone is its own."""
        return until(self._named, "Sentinels agree on a primary", CHANGE_TIMEOUT_S)

    def replaced(self, old: Node) -> Node:
        """Waits until another server is the primary and knows it. Returns that server."""

        def replaced() -> Node | None:
            named = self._named()
            return named if named is not None and named is not old and named.info("role") == "master" else None

        return until(replaced, f"{old.address} is replaced", CHANGE_TIMEOUT_S)

    def revive(self) -> None:
        """Starts the killed processes. Returns when every Sentinel answers and every replica is in step.

        An old primary is made a replica here, because the Sentinels take ten seconds for it.
        """
        for sentinel in self.sentinels:
            if not sentinel.is_running:
                sentinel.start()
        self._sentinels_answer()
        primary = self.primary()
        for server in self.servers:
            if not server.is_running:
                server.start()
                until(server.answers, f"{server.address} answers", READY_TIMEOUT_S)
                if server is not primary:
                    server.order("REPLICAOF", HOST, primary.port)
        self.rejoined()

    def rejoined(self) -> None:
        """Waits until every running server except the primary is a replica of it, and in step."""
        until(self._in_step, "every replica is in step", CHANGE_TIMEOUT_S)

    def demand_replicas(self, count: int) -> None:
        """Sets min-replicas-to-write on every running server."""
        self._min_replicas = count
        for server in self.servers:
            if server.is_running:
                server.order("CONFIG", "SET", "min-replicas-to-write", count)

    def strike_primary(self, sent: signal.Signals) -> Node:
        """Sends the primary a signal when its replicas have every write that it has acknowledged. Returns it.

        So a write that is missing afterwards was lost by the mesh, not by the replication.
        """
        primary = self.primary()
        # The primary now refuses writes, while it still sends earlier ones to its replicas.
        primary.order("CONFIG", "SET", "min-replicas-to-write", REFUSING)
        self.caught_up()
        # A primary that is frozen and woken takes writes again: the pause ends by itself.
        primary.order("CLIENT", "PAUSE", PAUSE_MS, "WRITE")
        primary.order("CONFIG", "SET", "min-replicas-to-write", self._min_replicas)
        if sent is signal.SIGKILL:
            primary.kill()
        else:
            primary.send(sent)
        return primary

    def caught_up(self) -> None:
        """Waits until every replica that runs has what the primary had written when this was called."""
        primary = self.primary()
        written = primary.info("master_repl_offset")
        replicas = [server for server in self.servers if server is not primary and server.is_running]
        until(
            lambda: all((one.info("slave_repl_offset") or 0) >= written for one in replicas),
            "replicas have caught up",
            CHANGE_TIMEOUT_S,
        )

    def promote_stale(self, seconds: float) -> Node:
        """Holds every replica back for so long, then kills the primary. Returns the replica that becomes primary, which
        lacks the writes of that time."""
        primary = self.primary()
        self.caught_up()
        replicas = [server for server in self.servers if server is not primary and server.is_running]
        for replica in replicas:
            self.hold_back(replica)
        time.sleep(seconds)
        primary.kill()
        promoted = self.replaced(primary)
        for replica in replicas:
            self.let_go_on(replica)
        return promoted

    def hold_back(self, replica: Node) -> None:
        """Cuts a replica off from new writes. It runs on, and may be made primary."""
        replica.order("CONFIG", "SET", "masteruser", "nobody")
        replica.order("CLIENT", "KILL", "TYPE", "master")
        until(lambda: replica.info("master_link_status") == "down", "the replica's link is down", CHANGE_TIMEOUT_S)

    def let_go_on(self, replica: Node) -> None:
        """Ends what `hold_back` began: the replica follows its primary again."""
        replica.order("CONFIG", "SET", "masteruser", "")
        # When a Sentinel made it the primary, it wrote the configuration, with the option that held it back.
        replica.order("CONFIG", "REWRITE")

    def _make(self, attempt: int) -> None:
        count = 1 + self._replicas
        ports = [free_port() for _ in range(count + (SENTINELS if self._replicas else 0))]
        password, secret = secrets.token_hex(8), secrets.token_hex(8)
        self.servers, self.sentinels = [], []
        for number, port in enumerate(ports[:count]):
            options = {
                "appendonly": "yes",
                "appendfsync": "always",
                "save": '""',
                "maxmemory-policy": "noeviction",
                "requirepass": password,
                "masterauth": password,
                "repl-diskless-sync-delay": "0",
                "min-replicas-to-write": str(self._min_replicas),
            }
            if number:
                options["replicaof"] = f"{HOST} {ports[0]}"
            self.servers.append(node(self._directory / f"server-{number + 1}-{attempt}", port, password, options, []))
        for number, port in enumerate(ports[count:]):
            options = {
                "requirepass": secret,
                "sentinel monitor": f"{SERVICE} {HOST} {ports[0]} {QUORUM}",
                "sentinel auth-pass": f"{SERVICE} {password}",
                "sentinel down-after-milliseconds": f"{SERVICE} {self._down_after_ms}",
                "sentinel failover-timeout": f"{SERVICE} {FAILOVER_TIMEOUT_MS}",
            }
            directory = self._directory / f"sentinel-{number + 1}-{attempt}"
            self.sentinels.append(node(directory, port, secret, options, ["--sentinel"]))

    def _start(self) -> None:
        for server in self.servers:
            server.start()
        until(self.servers[0].answers, "the server answers", READY_TIMEOUT_S)
        # Sentinels look for replicas when they start, and then only every ten seconds. So replicas must follow before.
        until(lambda: self._follow(self.servers[0]), "every replica is in step", READY_TIMEOUT_S)
        for sentinel in self.sentinels:
            sentinel.start()
        self._sentinels_answer()
        until(lambda: all(map(self._knows_all, self.sentinels)), "Sentinels know all the others", READY_TIMEOUT_S)

    def _sentinels_answer(self) -> None:
        """Waits until they do. A Sentinel that was started again has forgotten its periods."""
        until(lambda: all(sentinel.answers() for sentinel in self.sentinels), "Sentinels answer", READY_TIMEOUT_S)
        for sentinel in self.sentinels:
            for name, period_ms in PERIODS_MS.items():
                sentinel.order("SENTINEL", "DEBUG", name, period_ms)

    def _in_step(self) -> bool:
        primary = self._named()
        return primary is not None and self._follow(primary)

    def _follow(self, primary: Node) -> bool:
        return all(
            server.info("master_port") == primary.port and server.info("master_link_status") == "up"
            for server in self.servers
            if server is not primary and server.is_running
        )

    def _knows_all(self, sentinel: Node) -> bool:
        state = self._state(sentinel)
        return (state.get("num-slaves"), state.get("num-other-sentinels")) == (self._replicas, SENTINELS - 1)

    def _named(self) -> Node | None:
        if not self.sentinels:
            return self.servers[0]
        said = [self._state(sentinel).get("port") for sentinel in self.sentinels]
        return next((server for server in self.servers if said.count(server.port) >= QUORUM), None)

    def _state(self, sentinel: Node) -> dict[str, Any]:
        try:
            with sentinel.client() as client:
                return cast("dict[str, Any]", client.sentinel_master(SERVICE))
        except (RedisError, OSError):
            return {}


T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str, timeout_s: float) -> T:
    """Waits for the condition's first true value. Raises TimeoutError that says what did not happen."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"did not happen within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)
    return value
