"""Regions of system shared memory: inputs and outputs of clients on this gateway's machine (triton-spec 5.9).

A region is a part of a file in /dev/shm that a client has registered under a name. It is read and written by system
calls and never mapped: a client that shortens a mapped file would end this process by SIGBUS. What a request names is
copied when it is admitted, so the client may use the memory again before the answer comes; an answer is written when it
is sent. Regions belong to one gateway, or to all gateways that share a port (`gateway.requests.region_folder`), and are
forgotten with the last of them.

A gateway opens these files with its own rights, for whoever asks. So all of it is off unless the operator allows it,
and the names of files can be confined to a prefix.
"""

from __future__ import annotations

import asyncio
import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path

from gateway.bounds.byte_budget import ByteBudget
from gateway.requests.region_folder import RegionEntry, RegionFolder
from shared.contract.errors import Code, MeshError, RequestError, UnavailableError

FOLDER = Path("/dev/shm")  # noqa: S108  shared memory is there and nowhere else: shm_open(3)
LOOK_S = 1.0
"""Pause between two looks for regions that were unregistered at another gateway."""
REGIONS_MAX = 1024
"""Regions of one gateway: each takes an open file."""
NAME_CHARACTERS_MAX = 256
RESERVED_PREFIX = "triton_python_backend_shm_region_"
DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
"""Triton's words. Its option wants a value, the gateway's none."""


class RegionFile:
    """An open file. It is closed when nobody uses it any more, that is, neither a region nor an unanswered request."""

    __slots__ = ("__weakref__", "descriptor")

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be opened for reading and writing."""
        # Not blocking, because a file that is no memory may be a pipe.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self.descriptor = os.open(path, flags)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            raise OSError(f"{path} is no regular file")

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        """So many bytes; fewer where the file ends."""
        data = os.pread(self.descriptor, size, offset)
        # One call gives at most some 2 GiB.
        while len(data) < size and (more := os.pread(self.descriptor, size - len(data), offset + len(data))):
            data += more
        return data

    def write(self, offset: int, data: bytes) -> None:
        """Raises OSError when there is no memory left."""
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self.descriptor, rest, offset)
            offset += written
            rest = rest[written:]


@dataclass(frozen=True, slots=True)
class Region:
    """A region that this gateway has open. stamp: of its registration, where gateways share them; else None"""

    entry: RegionEntry
    file: RegionFile
    stamp: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class RegionPart:
    """The part of a region that a request names for one tensor. offset: from the region's beginning, bytes."""

    region: Region
    offset: int
    byte_size: int

    def read(self) -> bytes:
        """The part's bytes. Raises RequestError when the file has become shorter."""
        data = self.region.file.read(self.region.entry.offset + self.offset, self.byte_size)
        if len(data) < self.byte_size:
            raise self._shrunk()
        return data

    def write(self, output: str, data: bytes) -> None:
        """Writes an output. Raises RequestError (INTERNAL) when it does not fit, or cannot be written."""
        if len(data) > self.byte_size:
            raise RequestError(
                f"shared memory size specified with the request for output '{output}' ({self.byte_size} bytes) should "
                f"be at least {len(data)} bytes to hold the results",
                Code.INTERNAL,
            )
        begin = self.region.entry.offset + self.offset
        # A write beyond the end would make the file longer.
        if self.region.file.size < begin + len(data):
            raise self._shrunk()
        try:
            self.region.file.write(begin, data)
        except OSError as error:
            raise RequestError(
                f"unable to write output '{output}' into shared memory region '{self.region.entry.name}': "
                f"{error.strerror}",
                Code.INTERNAL,
            ) from error

    def _shrunk(self) -> MeshError:
        return RequestError(
            f"the file of shared memory region '{self.region.entry.name}' is shorter than when it was registered",
            Code.INTERNAL,
        )


class Regions:
    """The regions of one gateway, or of all that share its ports.

    is_allowed   whether there may be any
    key_prefix   names of files begin with it
    bytes_max    bytes that one request may take from regions
    budget       has room for them, too, when a request is read
    shared       what is registered at the gateways that share the port; None: this gateway shares none
    """

    def __init__(
        self,
        *,
        is_allowed: bool = False,
        key_prefix: str = "",
        bytes_max: int = 0,
        budget: ByteBudget | None = None,
        shared: RegionFolder | None = None,
        folder: Path = FOLDER,
    ) -> None:
        self.is_allowed = is_allowed
        self._key_prefix = key_prefix.removeprefix("/")
        self._bytes_max = bytes_max
        self._budget = budget
        self._shared = shared
        self._folder = folder
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Adds a region.

        raises  RequestError with Triton's words: a name twice, a key that is no file in /dev/shm or not an allowed one,
                a size beyond the file's; UnavailableError at the bound
        """
        self._check_allowed()
        plain = key.removeprefix("/")
        if plain.startswith(RESERVED_PREFIX):
            raise RequestError(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved "
                f"prefix '{RESERVED_PREFIX}'"
            )
        if not name:
            raise RequestError("'region name' is necessary to register system shared memory region")
        if self._regions.get(name) if self._shared is None else self._shared.stamp(name):
            raise already_there(name)
        if len(name) > NAME_CHARACTERS_MAX:
            raise RequestError(f"the name of a shared memory region has at most {NAME_CHARACTERS_MAX} characters")
        # No file is read for it: a registration that read all the others would hold the loop for ten milliseconds.
        if len(self._regions if self._shared is None else self._shared) >= REGIONS_MAX:
            raise UnavailableError(f"this gateway has {REGIONS_MAX} shared memory regions: unregister some")
        region = Region(RegionEntry(name, key, offset, byte_size), self._open(key))
        if not byte_size or offset + byte_size > region.file.size:
            raise RequestError(f"failed to register shared memory region '{name}': invalid args")
        if self._shared is None:
            self._regions[name] = region
            return
        try:
            is_first = self._shared.add(region.entry)
        except OSError as error:
            raise UnavailableError(f"shared memory region '{name}' cannot be registered: {error.strerror}") from error
        if not is_first:
            raise already_there(name)

    def unregister(self, name: str = "") -> None:
        """Removes one region, or all ("" as name). Requests that are under way keep what they use. An unknown name is
        no error, as in Triton."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()
        if self._shared is not None:
            self._shared.remove(name) if name else self._shared.clear()

    def status(self, name: str = "") -> list[RegionEntry]:
        """What is registered under that name, or at all ("" as name). Raises RequestError (NOT_FOUND)."""
        if self._shared is not None:
            entries = self._shared.entries()
        else:
            entries = [region.entry for region in self._regions.values()]
        found = [entry for entry in entries if name in ("", entry.name)]
        if name and not found:
            raise RequestError(f"Unable to find system shared memory region: '{name}'", Code.NOT_FOUND)
        return found

    async def run(self) -> None:
        """Closes regions that were unregistered at another gateway, so that their memory is given back. Endless."""
        while True:
            await asyncio.sleep(LOOK_S)
            for name in list(self._regions):
                self._forget(name)

    def part(self, name: str, offset: int, byte_size: int) -> RegionPart:
        """A part of a region. Raises RequestError with Triton's words when there is no such region or part."""
        self._check_allowed()
        region = self._find(name)
        if region is None:
            raise RequestError(f"Unable to find shared memory region: '{name}'", Code.NOT_FOUND)
        if not 0 <= offset < region.entry.byte_size:
            raise RequestError(f"Invalid offset for shared memory region: '{name}'")
        if not 0 < byte_size <= region.entry.byte_size - offset:
            raise RequestError(f"Invalid offset + byte size for shared memory region: '{name}'")
        return RegionPart(region, offset, byte_size)

    def read(self, part: RegionPart, *, taken: int = 0) -> bytes:
        """An input's bytes.

        taken   bytes that the same request has read before
        raises  RequestError beyond `bytes_max`; UnavailableError when the gateway has no room for them
        """
        size = taken + part.byte_size
        if size > self._bytes_max:
            raise RequestError(
                f"the request takes {size} bytes from shared memory, and this gateway takes at most {self._bytes_max}",
                Code.RESOURCE_EXHAUSTED,
            )
        if self._budget is not None:
            # Given back at once: the request is admitted in the same turn, and its inputs count from then on.
            with self._budget.reserve() as reservation:
                reservation.hold(size)
        return part.read()

    def _check_allowed(self) -> None:
        if not self.is_allowed:
            raise RequestError(DISABLED, Code.UNSUPPORTED)

    def _find(self, name: str) -> Region | None:
        """The region of that name. Where gateways share them it is opened with its first use at this one.

        Raises RequestError when it cannot be opened.
        """
        if self._shared is None:
            return self._regions.get(name)
        self._forget(name)
        region = self._regions.get(name)
        if region is None:
            # The stamp comes first: if the entry is of a later registration, the next use finds another stamp.
            stamp, entry = self._shared.stamp(name), self._shared.find(name)
            if stamp is None or entry is None:
                return None
            region = self._regions[name] = Region(entry, self._open(entry.key), stamp)
        return region

    def _forget(self, name: str) -> None:
        """Closes a region unless its registration still counts at the gateways that share it.

        Requests that take long to decode ask in other threads: one of them may have closed it meanwhile.
        """
        region = self._regions.get(name)
        if self._shared is not None and region is not None and region.stamp != self._shared.stamp(name):
            self._regions.pop(name, None)

    def _open(self, key: str) -> RegionFile:
        plain = key.removeprefix("/")
        refusal = f"Unable to open shared memory region: '{key}'"
        # shm_open(3) takes no slash but the first one either.
        if not plain or "/" in plain or "\0" in plain or plain in (".", ".."):
            raise RequestError(refusal, Code.INTERNAL)
        if not plain.startswith(self._key_prefix):
            text = f"{refusal}: this gateway takes keys that begin with '{self._key_prefix}' (--client-shm-prefix)"
            raise RequestError(text, Code.FORBIDDEN)
        try:
            return RegionFile(self._folder / plain)
        except (OSError, ValueError) as error:
            raise RequestError(refusal, Code.INTERNAL) from error


NO_REGIONS = Regions()
"""Of a gateway that allows none."""


def already_there(name: str) -> RequestError:
    """The error of a second registration of a name. Triton's words."""
    return RequestError(f"shared memory region '{name}' already in manager", Code.ALREADY_EXISTS)


def cuda_refusal(name: str) -> RequestError:
    """The error of a registration of CUDA memory: a gateway has no GPU. Triton's words where it was built without."""
    return RequestError(f"failed to register CUDA shared memory region: '{name}', GPUs not supported", Code.UNSUPPORTED)
