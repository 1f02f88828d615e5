"""The data directory of a mesh on this machine: its lock, and mesh.json, which says what runs in it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from deploy.local.private_files import make_private
from deploy.local.terminal import say
from shared.contract.locations import is_utf8
from shared.process.addresses import authority
from shared.store.keyspace import DEFAULT_PREFIX


class ChildState(msgspec.Struct):
    """One process of the mesh. Only gateways have ports, and the console has an `http_port`; `pid` is 0 between two
    runs."""

    name: str
    service: str
    pid: int
    log: str
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0


class MeshState(msgspec.Struct):
    """The content of mesh.json: the mesh that runs in a data directory."""

    pid: int
    host: str
    redis_url: str
    ready: bool
    children: list[ChildState]
    key_prefix: str = DEFAULT_PREFIX

    @property
    def gateway(self) -> ChildState:
        """The first gateway, for what any of them would do."""
        return next(child for child in self.children if child.service == "gateway")

    @property
    def grpc_address(self) -> str:
        """Where the first gateway speaks gRPC."""
        return authority(self.host, self.gateway.grpc_port)


class LauncherError(click.ClickException):
    """A mesh cannot be started, or is not there, or does not do what it is started for; the message says why."""


class NotRunningError(LauncherError):
    """No mesh runs in the data directory."""


@contextmanager
def keeping_data(directory: Path) -> Generator[None]:
    """Raises `LauncherError` in place of an OSError: nothing can be kept in the directory."""
    try:
        yield
    except OSError as refused:
        raise LauncherError(f"no data can be kept in {directory} ({refused}): give another --data-dir") from refused


@contextmanager
def locked(data_dir: Path) -> Generator[None]:
    """Holds the data directory. Raises `LauncherError` if it cannot be written, or another launcher holds it, or
    another user owns it, or mesh.json could not name what is in it."""
    if not is_utf8(data_dir):
        raise LauncherError(f"the path of {data_dir} is no UTF-8: rename what is not, or give another --data-dir")
    with keeping_data(data_dir):
        open_to_others = make_private(data_dir)
        opened = (data_dir / "lock").open("a+")
    if open_to_others:
        say(f"warning: {open_to_others}")
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise LauncherError(
                f"{data_dir} is in use by another launcher (process {lock.read().strip() or 'unknown'}); "
                "stop it, or give another --data-dir"
            ) from None
        with keeping_data(data_dir):
            lock.truncate(0)
            os.write(lock.fileno(), str(os.getpid()).encode())
        yield


def is_locked(data_dir: Path) -> bool:
    """Whether a launcher holds the data directory: the kernel lets go for one that was killed. A launcher that starts
    at this very moment, where none runs, may be refused."""
    try:
        with (data_dir / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def state_path(data_dir: Path) -> Path:
    return data_dir / "mesh.json"


def write_state(data_dir: Path, state: MeshState) -> None:
    """Replaces mesh.json atomically. Only its owner may read it, because the URL may hold a password."""
    path = state_path(data_dir)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2))
    new.replace(path)


def has_state(data_dir: Path) -> bool:
    """Whether there is a mesh.json. If this user may not look, there may be one."""
    try:
        state_path(data_dir).stat()
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))
    return True


def read_state(data_dir: Path) -> MeshState:
    """The state of the mesh that runs in a data directory. Raises `NotRunningError` if none runs, and `LauncherError`
    if it may not be read."""
    path = state_path(data_dir)
    try:
        # Not looked for before: a mesh that ends takes its file away.
        return msgspec.json.decode(path.read_bytes(), type=MeshState)
    except (FileNotFoundError, NotADirectoryError) as absent:
        raise NotRunningError(
            f"no mesh runs in {data_dir}: start one with `seqmesh up`, or give its --data-dir"
        ) from absent
    except OSError as refused:
        remedy = "only the user who started `seqmesh up` there may: be that user, or give the mesh's --redis-url"
        raise LauncherError(f"{path} cannot be read ({refused.strerror}): {remedy}") from refused
    except msgspec.MsgspecError as error:
        raise LauncherError(f"{path} cannot be read ({error}): start the mesh again with `seqmesh up`") from error
