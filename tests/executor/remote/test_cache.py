"""Copies of models on this machine: complete or absent, kept while used, bounded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

import pytest

from executor.remote.cache import INCOMING, Cache
from executor.remote.listing import Listing, RemoteFile
from shared.contract.errors import LoadError
from shared.contract.locations import RemoteLocation

PLACE = RemoteLocation("s3", "", "bucket/models")


def listing(model: str = "m", **contents: int) -> Listing:
    """A model with files of these sizes."""
    return Listing(model, tuple(RemoteFile(f"1/{name}", size, 1000 + size) for name, size in contents.items()), ("2",))


class Store:
    """Writes what is fetched, and remembers it."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.before: Callable[[], None] = lambda: None

    def __call__(self, files: Sequence[RemoteFile], folder: Path) -> None:
        self.before()
        for file in files:
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.path).write_bytes(b"x" * file.size)
            self.fetched.append(file.path)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 1000)


def copies(cache: Cache) -> list[str]:
    return sorted(path.name for path in cache.directory.iterdir() if path.name != INCOMING)


def test_a_relative_cache_stays_where_it_is_when_a_model_changes_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = Cache(Path("cache"), 1 << 20)
    monkeypatch.chdir("/")

    assert tmp_path / "cache" == cache.directory
    assert 0 == cache.size()


def test_a_copy_is_the_model_and_goes_with_its_last_user(cache: Cache) -> None:
    store = Store()
    first = cache.copy_of(PLACE, listing(a=10), store)
    second = Cache(cache.directory, 1000).copy_of(PLACE, listing(a=10), store)

    assert "m" == first.folder.name
    assert first.folder == second.folder
    assert b"x" * 10 == (first.folder / "1" / "a").read_bytes()
    assert (first.folder / "2").is_dir()
    assert ["1/a"] == store.fetched
    first.cleanup()
    assert second.folder.exists()
    second.cleanup()
    assert [] == copies(cache)


def test_another_listing_is_another_copy_that_shares_what_did_not_change(cache: Cache) -> None:
    store = Store()
    old = cache.copy_of(PLACE, listing(a=10, b=20), store)
    new = cache.copy_of(PLACE, listing(a=10, b=30), store)

    assert ["1/a", "1/b", "1/b"] == store.fetched
    assert old.folder != new.folder
    assert 20 == (old.folder / "1" / "b").stat().st_size
    assert 10 + 20 + 30 == cache.size()
    old.cleanup()
    assert b"x" * 10 == (new.folder / "1" / "a").read_bytes()


def test_a_process_that_ends_leaves_its_copies_to_the_next(cache: Cache) -> None:
    store = Store()
    cache.copy_of(PLACE, listing(a=10), store)
    cache.is_closing = True
    cache.copy_of(PLACE, listing(a=10), store).cleanup()

    Cache(cache.directory, 1000).copy_of(PLACE, listing(a=10), store)

    assert ["1/a"] == store.fetched


def test_what_a_killed_process_had_begun_to_fetch_is_begun_anew(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # Nothing is cleaned up after SIGKILL either.
        patch.setattr("executor.remote.cache.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.copy_of(PLACE, listing(a=10), killed)
    (left,) = (cache.directory / INCOMING).glob("*/*")
    (left / "m" / "half").write_bytes(b"x")

    copy = cache.copy_of(PLACE, listing(a=10), Store())

    assert ["1", "2"] == sorted(path.name for path in copy.folder.iterdir())
    assert [] == list((cache.directory / INCOMING).iterdir())


def test_a_fetch_that_fails_leaves_nothing_in_place(cache: Cache) -> None:
    def half(files: Sequence[RemoteFile], folder: Path) -> None:
        Store()([RemoteFile(file.path, file.size - 1, 0) for file in files], folder)

    with pytest.raises(OSError, match="1/a was not fetched whole"):
        cache.copy_of(PLACE, listing(a=10), half)
    assert [] == copies(cache)


def test_one_process_fetches_and_the_others_wait_for_it(cache: Cache) -> None:
    store = Store()
    others = [Thread(target=lambda: cache.copy_of(PLACE, listing(a=10), store)) for _ in range(3)]

    def begin() -> None:
        for other in others:
            if other.ident is None:
                other.start()

    store.before = begin

    cache.copy_of(PLACE, listing(a=10), store)
    for other in others:
        other.join()

    assert ["1/a"] == store.fetched


def test_the_oldest_unused_copy_makes_room_and_used_ones_never_do(cache: Cache) -> None:
    store = Store()
    for age, model in enumerate(("old", "older", "oldest")):
        one = cache.copy_of(PLACE, listing(model, a=300), store)
        os.close(one.lock)
        os.utime(one.folder.parent, (1000 - age, 1000 - age))
    used = cache.copy_of(PLACE, listing("old", a=300), store)

    cache.copy_of(PLACE, listing("new", a=350), store)

    assert 300 + 300 + 350 == cache.size()
    assert used.folder.exists()
    with pytest.raises(
        LoadError, match=r"'huge' needs 800 bytes more .* 650 of 1000 are in use: raise --model-cache-b"
    ):
        cache.copy_of(PLACE, listing("huge", a=800), store)


def test_a_copy_that_another_process_removes_while_the_cache_is_measured_does_not_count(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, _ = (cache.copy_of(PLACE, listing(model, a=size), Store()) for model, size in (("going", 10), ("stays", 20)))
    scandir = os.scandir

    def removed_before(path: Path | str) -> object:
        if str(path) == str(going.folder):
            monkeypatch.undo()
            going.cleanup()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_before)

    assert 20 == cache.size()
    assert not going.folder.exists()


def test_a_copy_that_somebody_has_changed_is_fetched_again_or_refused(cache: Cache) -> None:
    store = Store()
    copy = cache.copy_of(PLACE, listing(a=10), store)
    (copy.folder / "1" / "a").chmod(0o600)
    (copy.folder / "1" / "a").write_bytes(b"y")

    with pytest.raises(LoadError, match="somebody has changed"):
        cache.copy_of(PLACE, listing(a=10), store)
    os.close(copy.lock)
    again = cache.copy_of(PLACE, listing(a=10), store)
    assert b"x" * 10 == (again.folder / "1" / "a").read_bytes()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()

    with pytest.raises(LoadError, match="others may write to it"):
        Cache(tmp_path / "open", 1)
    with pytest.raises(LoadError, match="give --model-cache-dir"):
        Cache(tmp_path / "file" / "x", 1)
