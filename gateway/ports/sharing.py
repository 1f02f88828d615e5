"""Several gateways of one mesh on the same HTTP and gRPC ports of a machine (SO_REUSEPORT).

The system spreads connections over all sockets that share a port. It refuses the port to another user's processes, and
to a program that does not share. But it takes anybody of the same user who shares, also a gateway of another mesh or
another program, which then gets some of the requests. So gateways that share a port meet in a folder of shared memory:

    (the folder)   locked while a gateway starts, so that they start one after the other
    mesh           locked (shared) by each gateway while it lives; its text says of which mesh they are
    regions/       the clients' regions of shared memory (`gateway.requests.region_folder`)

Who finds nobody alive there comes first, and takes the ports only if nobody at all listens on them. Whoever follows
compares the mesh. The locks end with their processes, however these end. The last to leave removes the folder; what
a killed one leaves behind is cleared by the next that comes first.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from gateway.ports.listening import bound
from shared.contract.errors import UnavailableError

FOLDERS = Path("/dev/shm")  # noqa: S108  in memory, and seen by whoever shares memory with clients
NETWORK = Path("/proc/self/ns/net")
WAIT_S = 30.0
"""How long another gateway may take to start."""
LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class SharedPorts:
    """What gateways agree on that share ports. mesh: a text that only gateways of one mesh have in common"""

    host: str
    http_port: int
    grpc_port: int
    mesh: str

    @property
    def name(self) -> str:
        """The folder's name: of these addresses, in this network, of this user."""
        network = NETWORK.stat().st_ino
        return f"seqmesh-{os.geteuid()}-{network}-{quote(self.host, safe='')}-{self.http_port}"

    @property
    def text(self) -> str:
        """What a gateway that shares the ports writes down, and what the next one compares with its own."""
        return f"gRPC port {self.grpc_port}, mesh {self.mesh}"


class PortShare:
    """This gateway's share in its ports, from `taken` until `leave`. folder: what the gateways of the ports share"""

    def __init__(self, folder: Path, starting: int, living: int) -> None:
        self.folder = folder
        self._starting = starting
        self._living = living

    def opened(self) -> None:
        """The ports are open: the next gateway may start."""
        fcntl.flock(self._starting, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Ends this gateway's share, after its ports are closed. May be called before they were opened."""
        # If another gateway starts just now, there is nothing to remove.
        if locked(self._starting) and locked(self._living):
            shutil.rmtree(self.folder)
        os.close(self._living)
        os.close(self._starting)


@asynccontextmanager
async def sharing(ports: SharedPorts, folders: Path = FOLDERS) -> AsyncGenerator[PortShare]:
    """A share in ports, within the block.

    raises  UnavailableError when gateways of another mesh have one of them, or anybody else has
    """
    folder = folders / ports.name
    try:
        starting = await locked_folder(folder, ports)
        living = os.open(folder / "mesh", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UnavailableError(f"ports cannot be shared (--reuse-port) without {folder}: {error}") from error
    share = PortShare(folder, starting, living)
    try:
        if locked(living):
            refuse_taken(ports)
            begin(folder, living, ports)
        fcntl.flock(living, fcntl.LOCK_SH)
        refuse_strangers(living, ports)
        yield share
    finally:
        share.leave()


async def locked_folder(folder: Path, ports: SharedPorts) -> int:
    """The folder, made if need be, as an open file that is locked. Raises UnavailableError if it stays locked."""
    end = asyncio.get_running_loop().time() + WAIT_S
    while asyncio.get_running_loop().time() < end:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # Until it is locked here, who was the last to leave may remove it.
        with suppress(FileNotFoundError):
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            found = os.fstat(opened)
            if found.st_uid != os.geteuid():
                os.close(opened)
                raise PermissionError("it belongs to another user")
            if locked(opened) and os.fstat(opened).st_nlink:
                return opened
            os.close(opened)
        await asyncio.sleep(LOOK_S)
    raise UnavailableError(f"another gateway has been starting on {ports.host}:{ports.http_port} for {WAIT_S:.0f} s")


def locked(file: int) -> bool:
    """Locks an open file for this process alone; False if another one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def begin(folder: Path, living: int, ports: SharedPorts) -> None:
    """Clears what killed gateways have left behind, and says whose ports these are."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    os.ftruncate(living, 0)
    os.pwrite(living, ports.text.encode(), 0)


def refuse_taken(ports: SharedPorts) -> None:
    """Raises UnavailableError if anybody listens on one of the ports: without sharing, the system says so."""
    for name, port in (("HTTP", ports.http_port), ("gRPC", ports.grpc_port)):
        try:
            bound(ports.host, port).close()
        except UnavailableError as error:
            raise UnavailableError(
                f"{name} cannot share {ports.host}:{port} (--reuse-port): no gateway of this user and this address "
                f"shares it, and something else listens there: stop that, or choose another port ({error.__cause__})"
            ) from error


def refuse_strangers(living: int, ports: SharedPorts) -> None:
    """Raises UnavailableError if the gateways that live there are not of this mesh, or have another gRPC port."""
    found = os.pread(living, 1 << 16, 0).decode(errors="replace")
    if found != ports.text:
        raise UnavailableError(
            f"HTTP cannot share {ports.host}:{ports.http_port} (--reuse-port): gateways listen there with {found}, and "
            f"this one has {ports.text}: requests would be mixed up. Choose other ports, or the same for all"
        )
