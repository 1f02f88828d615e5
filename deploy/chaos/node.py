"""A server or a Sentinel: a real process on loopback, to be killed, frozen, started again and left behind.

For chaos and for tests. The bundled server has both roles, so nothing else has to be installed. Calls block, and a
process dies with the thread that started it (`deploy.local.tether`).
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from deploy.local.embedded import AppendFsync, free_port, log_tail, server_command
from deploy.local.private_files import PRIVATE_UMASK, make_private
from deploy.local.private_mesh import stop
from deploy.local.tether import tethered

HOST = "127.0.0.1"
READY_TIMEOUT_S = 30.0
CHANGE_TIMEOUT_S = 60.0
"""A failover takes two seconds, and a new attempt after one that failed ten."""
POLL_S = 0.05
PROBE_INTERVAL_S = 0.01
START_ATTEMPTS = 5
"""Another process may take a free port between the search for it and the server's binding it."""
PORT_TAKEN = "Address already in use"


class ServerFailedError(RuntimeError):
    """The server program did not come up; the message ends with the end of its log."""


class Started(ABC):
    """Is started on entry of a `with`, and stopped on exit."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Node(Started):
    """One process, with a password. It has its own configuration file, because it may rewrite it.

    data_dir     of its own; made when absent. It holds its data, which the next start finds, `redis.conf` and
                 `redis.log`
    password     a random one by default
    options      of its configuration, beside the password
    appendfsync  when a server syncs its file to the disk
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        password: str = "",
        options: Mapping[str, str] | None = None,
        appendfsync: AppendFsync = "everysec",
        is_sentinel: bool = False,
    ) -> None:
        self.data_dir = data_dir.resolve()
        self.port = 0
        """A free one is chosen at the first start, and kept across restarts."""
        self.password = password or secrets.token_hex(16)
        self._options = {"requirepass": self.password, **(options or {})}
        self._appendfsync: AppendFsync = appendfsync
        self._is_sentinel = is_sentinel
        self._log = self.data_dir / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{self.address}/0"

    @property
    def pid(self) -> int:
        """Only while it runs."""
        assert self._process is not None, f"{self.address} does not run"
        return self._process.pid

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
        """Returns when it takes commands. Raises `ServerFailedError` when it exits or takes too long."""
        assert not self.is_running, f"{self.address} runs already"
        make_private(self.data_dir)
        given = self.port
        for _ in range(1 if given else START_ATTEMPTS):
            self.port = given or free_port(HOST)
            self._spawn()
            if self._becomes_ready():
                return
            self.kill()
            if PORT_TAKEN not in log_tail(self._log):
                break
        raise ServerFailedError(
            f"the server did not start on {self.address}; the end of {self._log}:\n{log_tail(self._log)}"
        )

    def stop(self) -> None:
        """Stops it in order: a primary ends when its replicas have all its data. No effect if it has ended."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it as a crash would. No effect if it has ended."""
        self._end(signal.SIGKILL)

    def send(self, sent: signal.Signals) -> None:
        """SIGKILL ends it, SIGSTOP freezes it, SIGCONT wakes it. Only while it runs."""
        if sent is signal.SIGKILL:
            self.kill()
        else:
            os.kill(self.pid, sent)

    def answers(self) -> bool:
        """Whether it takes commands."""
        return bool(self.said(lambda client: client.ping()))

    def info(self, name: str) -> Any:
        """A field of its INFO; None while it does not answer."""
        told: dict[str, Any] = self.said(lambda client: client.info("replication")) or {}
        return told.get(name)

    def said(self, asked: Callable[[Any], Any]) -> Any:
        """What a call of its client returns; None while it does not answer."""
        try:
            with self.client() as client:
                return asked(client)
        except (RedisError, OSError):
            return None

    def hold_back(self) -> None:
        """Cuts a replica off from new writes. It runs on, and may be made primary."""
        self.order("CONFIG", "SET", "masteruser", "nobody")
        self.order("CLIENT", "KILL", "TYPE", "master")
        until(lambda: self.info("master_link_status") == "down", "the replica's link is down", CHANGE_TIMEOUT_S)

    def let_go_on(self) -> None:
        """Ends what `hold_back` began: the replica follows its primary again."""
        self.order("CONFIG", "SET", "masteruser", "")
        # When a Sentinel made it the primary, it wrote the configuration, with the option that held it back.
        self.order("CONFIG", "REWRITE")

    def _spawn(self) -> None:
        # The password stands in a file: a command line shows in the list of processes.
        config = self.data_dir / "redis.conf"
        if not config.exists():
            config.touch(mode=0o600)
            config.write_text("".join(f"{option} {value}\n" for option, value in self._options.items()))
        program, *flags = server_command(self.data_dir, {"bind": HOST, "port": str(self.port)}, self._appendfsync)
        if self._is_sentinel:
            flags = ["--sentinel", "--bind", HOST, "--port", str(self.port), "--dir", str(self.data_dir)]
        self._log.touch(mode=0o600)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                tethered([program, str(config), *flags], signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=PRIVATE_UMASK,
            )

    def _becomes_ready(self) -> bool:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            if self.answers():
                return True
            time.sleep(PROBE_INTERVAL_S)
        return False

    def _end(self, sent: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            stop(process, sent)


T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str, timeout_s: float) -> T:
    """Waits for the condition's first true value. Raises TimeoutError that says what did not happen."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"did not happen within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)
    return value
