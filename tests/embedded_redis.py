"""A real server for the tests, over TCP with a password: to be stopped, killed, started again, put behind a proxy."""

from __future__ import annotations

import secrets
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from deploy.local.embedded import AppendFsync, free_port, log_tail, server_command
from deploy.local.private_files import PRIVATE_UMASK, make_private
from deploy.local.tether import tethered

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
PROBE_INTERVAL_S = 0.01
START_ATTEMPTS = 5
"""Another process may take a free port between the search for it and the server's binding it."""


class ServerFailedError(RuntimeError):
    """The server program did not come up; the message ends with the end of its log."""


class EmbeddedRedis:
    """One server process in a data directory, with a password. It ends with the process that started it.

    data_dir     holds the append-only file and `redis.log`; made when absent. A second start in the same directory
                 finds the data of the first
    port         0 picks a free port at the first start, and keeps it across restarts
    appendfsync  when the server syncs its file to the disk
    password     a random one by default
    options      further lines of its configuration

    A context manager: starts on entry, stops on exit.
    """

    host = "127.0.0.1"

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        appendfsync: AppendFsync = "everysec",
        password: str = "",
        options: Sequence[str] = (),
    ) -> None:
        self.data_dir = data_dir
        self.port = port
        self.password = password or secrets.token_urlsafe(24)
        self._options = options
        self.log_path = data_dir / "redis.log"
        self._appendfsync: AppendFsync = appendfsync
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """`redis://:password@host:port/0`."""
        return f"redis://:{self.password}@{self.host}:{self.port}/0"

    @property
    def nodes(self) -> Sequence[Self]:
        """As of a Cluster: itself."""
        return [self]

    @property
    def pid(self) -> int:
        """Only while it runs."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is alive (it may still be loading)."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when the server takes commands. Raises `ServerFailedError` when it exits or takes too long."""
        assert not self.is_running, "the server runs already"
        make_private(self.data_dir)
        given = self.port
        for _ in range(1 if given else START_ATTEMPTS):
            self.port = given or free_port(self.host)
            self._spawn()
            if self._becomes_ready():
                return
            self.kill()
            if "Address already in use" not in log_tail(self.log_path):
                break
        raise ServerFailedError(
            f"the server did not start on {self.host}:{self.port}; the end of {self.log_path}:\n"
            f"{log_tail(self.log_path)}"
        )

    def stop(self) -> None:
        """Asks the server to write out its file and exit; kills it when that takes too long. No effect when stopped."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, as a crash would end it. The data directory stays; `start` again reads it."""
        self._end(signal.SIGKILL)

    def _spawn(self) -> None:
        directory = self.data_dir.resolve()
        # The password stands in a file: a command line shows in the list of processes.
        config = directory / "redis.conf"
        config.touch(mode=0o600)
        config.write_text("\n".join((f"requirepass {self.password}", *self._options, "")))
        program, *flags = server_command(directory, {"bind": self.host, "port": str(self.port)}, self._appendfsync)
        self.log_path.touch(mode=0o600)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                tethered([program, str(config), *flags], signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=PRIVATE_UMASK,
            )

    def _becomes_ready(self) -> bool:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.is_running and time.monotonic() < deadline:
            if self._takes_commands():
                return True
            time.sleep(PROBE_INTERVAL_S)
        return False

    def _takes_commands(self) -> bool:
        """Whether it does, and no other server at the same address."""
        try:
            with Redis(host=self.host, port=self.port, password=self.password, retry=Retry(NoBackoff(), 0)) as client:
                client.ping()
                return client.info("server")["process_id"] == self.pid  # pyright: ignore[reportIndexIssue]
        except RedisError:
            return False

    def _end(self, sent: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(sent)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
