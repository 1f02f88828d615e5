"""Regions of shared memory, without a protocol: which files may be one, and what becomes of files that change."""

from __future__ import annotations

import errno
import gc
import os
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.bounds.byte_budget import ByteBudget
from gateway.requests.region_folder import RegionFolder
from gateway.requests.regions import REGIONS_MAX, RESERVED_PREFIX, Regions
from shared.contract.errors import Code, MeshError, RequestError, UnavailableError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "mine").write_bytes(bytes(range(64)))
    return tmp_path / "shm"


def regions_in(folder: Path, **settings: object) -> Regions:
    given = {"is_allowed": True, "bytes_max": 1 << 20, "folder": folder} | settings
    return Regions(**given)  # pyright: ignore[reportArgumentType]


def refusal(regions: Regions, key: str, name: str = "r", offset: int = 0, byte_size: int = 1) -> tuple[Code, str]:
    with pytest.raises(MeshError) as caught:
        regions.register(name, key, offset, byte_size)
    return caught.value.code, caught.value.message


def opened(folder: Path) -> list[str]:
    """The files in a folder, and in those beside it, that this process has open. Of others some may go meanwhile."""
    gc.collect()
    found: list[str] = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(one.readlink()))
    return [name for name in found if name.startswith(str(folder.parent))]


def test_a_part_is_read_and_written_where_the_region_says(folder: Path) -> None:
    regions = regions_in(folder)
    regions.register("r", "/mine", 8, 16)

    assert bytes(range(12, 16)) == regions.read(regions.part("r", 4, 4))
    regions.part("r", 0, 16).write("OUT", b"abc")
    assert bytes(range(8)) + b"abc" + bytes(range(11, 64)) == (folder / "mine").read_bytes()


@pytest.mark.parametrize(
    "key", ["", "/", "..", "/..", ".", "../mine", "a/../mine", "/../mine", "//mine", "sub/mine", "mine\0", "nowhere"]
)
def test_a_key_names_a_file_of_shared_memory_and_nothing_else(folder: Path, key: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "mine").write_bytes(bytes(8))
    (folder.parent / "mine").write_bytes(bytes(8))

    assert (Code.INTERNAL, f"Unable to open shared memory region: '{key}'") == refusal(regions_in(folder), key)


def test_links_pipes_and_folders_are_no_memory(folder: Path) -> None:
    (folder.parent / "secret").write_bytes(bytes(8))
    (folder / "link").symlink_to(folder.parent / "secret")
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()

    for key in ("link", "pipe", "sub"):
        assert Code.INTERNAL == refusal(regions_in(folder), key)[0]
    assert not opened(folder)


def test_keys_can_be_confined_to_a_prefix(folder: Path) -> None:
    (folder / "app-1").write_bytes(bytes(8))
    regions = regions_in(folder, key_prefix="/app-")

    regions.register("r", "/app-1", 0, 8)
    regions.register("s", "app-1", 0, 8)
    code, text = refusal(regions, "/mine", "t")
    assert Code.FORBIDDEN == code
    assert "keys that begin with 'app-' (--client-shm-prefix)" in text


def test_what_cannot_be_registered_is_refused_in_tritons_words(folder: Path) -> None:
    regions = regions_in(folder)
    regions.register("r", "mine", 0, 64)
    invalid = "failed to register shared memory region 's': invalid args"
    reserved = f"/{RESERVED_PREFIX}1"

    assert (Code.ALREADY_EXISTS, "shared memory region 'r' already in manager") == refusal(regions, "mine")
    for offset, byte_size in ((0, 65), (60, 5), (64, 1), (1 << 63, 1 << 63), (0, 0)):
        assert (Code.INVALID_ARG, invalid) == refusal(regions, "mine", "s", offset, byte_size)
    assert "contains the reserved prefix 'triton_python_backend_shm_region_'" in refusal(regions, reserved, "s")[1]
    assert "'region name' is necessary" in refusal(regions, "mine", "")[1]
    assert ["r"] == [region.name for region in regions.status()]


@pytest.mark.parametrize(
    ("part", "code", "text"),
    [
        (("x", 0, 1), Code.NOT_FOUND, "Unable to find shared memory region: 'x'"),
        (("r", 16, 0), Code.INVALID_ARG, "Invalid offset for shared memory region: 'r'"),
        (("r", -1, 1), Code.INVALID_ARG, "Invalid offset for shared memory region: 'r'"),
        (("r", 0, 17), Code.INVALID_ARG, "Invalid offset + byte size for shared memory region: 'r'"),
        (("r", 15, 2), Code.INVALID_ARG, "Invalid offset + byte size for shared memory region: 'r'"),
        (("r", 0, 0), Code.INVALID_ARG, "Invalid offset + byte size for shared memory region: 'r'"),
        (("r", 0, -1), Code.INVALID_ARG, "Invalid offset + byte size for shared memory region: 'r'"),
    ],
)
def test_a_part_lies_in_its_region(folder: Path, part: tuple[str, int, int], code: Code, text: str) -> None:
    regions = regions_in(folder)
    regions.register("r", "mine", 8, 16)

    with pytest.raises(RequestError) as caught:
        regions.part(*part)

    assert (code, text) == (caught.value.code, caught.value.message)


def test_a_file_that_was_shortened_is_an_error_and_is_not_made_longer(folder: Path) -> None:
    regions = regions_in(folder)
    regions.register("r", "mine", 0, 64)
    part = regions.part("r", 0, 64)
    os.truncate(folder / "mine", 10)

    for attempt in (part.read, lambda: part.write("OUT", bytes(64))):
        with pytest.raises(RequestError, match="is shorter than when it was registered"):
            attempt()
    assert 10 == (folder / "mine").stat().st_size
    part.write("OUT", b"fits")


def test_an_output_that_does_not_fit_is_refused_and_not_cut(folder: Path) -> None:
    regions = regions_in(folder)
    regions.register("r", "mine", 0, 64)

    with pytest.raises(RequestError) as caught:
        regions.part("r", 0, 3).write("OUT", b"four")

    assert (
        "shared memory size specified with the request for output 'OUT' (3 bytes) should be at least 4 bytes to hold "
        "the results"
    ) == caught.value.message
    assert bytes(range(64)) == (folder / "mine").read_bytes()


def test_one_request_takes_no_more_than_a_message_may_bring(folder: Path) -> None:
    budget = ByteBudget(40)
    regions = regions_in(folder, bytes_max=64, budget=budget)
    regions.register("r", "mine", 0, 64)
    part = regions.part("r", 0, 32)

    regions.read(part)
    with pytest.raises(RequestError, match="takes 65 bytes from shared memory, and this gateway takes at most 64"):
        regions.read(part, taken=33)
    budget.take(20)
    with pytest.raises(UnavailableError, match="in flight"):
        regions.read(part)
    assert 20 == budget.taken


def test_files_are_closed_when_region_and_requests_have_gone(folder: Path) -> None:
    regions = regions_in(folder)
    regions.register("r", "mine", 0, 64)
    assert [str(folder / "mine")] == opened(folder)
    part = regions.part("r", 0, 4)

    regions.unregister("r")
    (folder / "mine").unlink()
    part.write("OUT", b"gone")
    assert b"gone" == part.read()
    del part
    assert not opened(folder)
    assert [] == regions.status()


def test_there_are_so_many_regions_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.requests.regions.REGIONS_MAX", 3)
    regions = regions_in(folder)
    for number in range(3):
        regions.register(f"r{number}", "mine", 0, 64)

    assert Code.UNAVAILABLE == refusal(regions, "mine", "one more")[0]
    regions.unregister()
    regions.register("one more", "mine", 0, 64)
    assert REGIONS_MAX > 3


def test_regions_of_all_gateways_that_share_a_port_are_counted_and_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them would take ten milliseconds of the loop at a thousand."""
    monkeypatch.setattr("gateway.requests.regions.REGIONS_MAX", 3)
    monkeypatch.setattr(RegionFolder, "entries", None)
    one, other = (regions_in(folder, shared=RegionFolder(tmp_path / "regions")) for _ in range(2))
    for number, regions in enumerate((one, other, one)):
        regions.register(f"r{number}", "mine", 0, 64)

    assert Code.UNAVAILABLE == refusal(other, "mine", "one more")[0]
    one.unregister("r1")
    other.register("one more", "mine", 0, 64)


def test_a_registration_for_which_there_is_no_room_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = RegionFolder(tmp_path / "regions")
    regions = regions_in(folder, shared=shared)
    write = Path.write_bytes

    def write_half(path: Path, content: bytes) -> None:
        write(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)

    no_room = "shared memory region 'r' cannot be registered: No space left on device"
    assert (Code.UNAVAILABLE, no_room) == refusal(regions, "/mine")
    assert [] == list(shared.path.iterdir())


def test_of_two_gateways_that_register_one_name_at_once_one_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (regions_in(folder, shared=RegionFolder(tmp_path / "regions")) for _ in range(2))
    one.register("r", "/mine", 0, 64)

    def not_there_yet(_shared: RegionFolder, _name: str) -> None:
        return None

    monkeypatch.setattr(RegionFolder, "stamp", not_there_yet)

    assert "shared memory region 'r' already in manager" == refusal(other, "/mine")[1]


def test_a_region_may_be_unregistered_while_another_thread_looks_whether_it_still_counts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decodes a large request looks in a thread of its own, the gateway's loop looks every second."""
    regions = regions_in(folder, shared=RegionFolder(tmp_path / "regions"))
    regions.register("r", "/mine", 0, 64)
    regions.part("r", 0, 1)
    stamp = RegionFolder.stamp

    def unregistered_first(shared: RegionFolder, name: str) -> tuple[int, int] | None:
        regions.unregister(name)
        return stamp(shared, name)

    monkeypatch.setattr(RegionFolder, "stamp", unregistered_first)

    with pytest.raises(RequestError, match=r"^Unable to find shared memory region: 'r'$"):
        regions.part("r", 0, 1)


def test_where_it_is_not_allowed_nothing_is_opened(folder: Path) -> None:
    regions = regions_in(folder, is_allowed=False)
    text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."

    assert (Code.UNSUPPORTED, text) == refusal(regions, "mine")
    with pytest.raises(RequestError, match="disabled"):
        regions.part("r", 0, 1)
    regions.unregister()
    regions.unregister("r")
    assert [] == regions.status()
