"""Groups of tests: what they share is started once, and closed when the group is over.

A group runs from its first test to its last on one worker, in whatever order the files were drawn. Files that share a
mesh are one group; every other file is a group of its own. A mesh that nobody uses any more still renews its leases, so
it must not stay until the end of the run: half a dozen of them take a third of a core from those that are at work.
Behind a failed test what it has used is closed as well (tests/failures.py).

Groups that share a mesh begin, being the longest, then those that wait for processes. Unit tests, which are short and
many, come last, so that all workers end at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from typing import Any, ClassVar, Generic, Self, TypeVar

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

SHARED_MESHES: dict[str, tuple[str, ...]] = {
    "shared_target": ("tests/conformance/",),
    "shared_wide_target": ("tests/conformance/",),
    "shared_mesh": (
        "tests/mesh/test_backlog.py",
        "tests/mesh/test_bad_input.py",
        "tests/mesh/test_documents.py",
        "tests/mesh/test_idle_sequences.py",
        "tests/mesh/test_interleaved_sequences.py",
        "tests/mesh/test_occupancy.py",
        "tests/mesh/test_operations.py",
        "tests/mesh/test_repeated_runs.py",
        "tests/mesh/test_replay.py",
        "tests/mesh/test_seed_documents.py",
        "tests/mesh/test_sequences.py",
        "tests/mesh/test_slot_waits.py",
        "tests/mesh/test_tenants.py",
    ),
    "shared_victim": (
        "tests/mesh/test_client.py",
        "tests/mesh/test_decoupled.py",
        "tests/mesh/test_examples.py",
        "tests/mesh/test_iterative_requests.py",
        "tests/mesh/test_killed_processes.py",
        "tests/mesh/test_monitoring.py",
        "tests/mesh/test_rolling_restart.py",
        "tests/mesh/test_statistics.py",
        "tests/mesh/test_virtual_slots.py",
    ),
}
"""Fixtures of meshes that several files use, and these files (or the folder with them): one group."""

GROUPS = {file: files[0] for files in SHARED_MESHES.values() for file in files}


def group_of(nodeid: str) -> str:
    """The group of a test, known by its id (a path from the root of the repository, `::`, a name)."""
    file = nodeid.split("::", maxsplit=1)[0]
    folder = file[: file.rfind("/") + 1]
    return GROUPS.get(file) or GROUPS.get(folder) or file


def in_groups(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests in the order in which they run: group by group, the longest groups first. Otherwise as they were.

    Raises `pytest.UsageError` for a test that uses a mesh of other files and is not in their group: its worker would
    start that mesh once more.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
        for fixture in SHARED_MESHES.keys() & set(getattr(item, "fixturenames", ())):
            if group_of(item.nodeid) != SHARED_MESHES[fixture][0]:
                raise pytest.UsageError(f"{item.nodeid} uses {fixture}: name its file in tests/groups.py")

    def rank(group: str) -> int:
        if group in GROUPS.values():
            return 0
        return 2 if all(item.get_closest_marker("unit") for item in groups[group]) else 1

    return list(chain.from_iterable(groups[group] for group in sorted(groups, key=rank)))


class GroupScheduling(LoadScopeScheduling):
    """Gives each worker of pytest-xdist whole groups, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


T = TypeVar("T")


class Shared(Generic[T]):
    """What the tests of a group share: opened when the first of them asks for it, closed after the last one.

    A context manager, for a fixture of the session: at its end it is closed, if a run ends in the middle of a group.
    """

    _open: ClassVar[list[Shared[Any]]] = []

    def __init__(self, opened: Callable[[], AbstractContextManager[T]]) -> None:
        self._opened = opened
        self._stack = ExitStack()
        self._value: T | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def get(self) -> T:
        """It, opened."""
        if self._value is None:
            self._value = self._stack.enter_context(self._opened())
            self._open.append(self)
        return self._value

    def close(self) -> None:
        """Closes it, if it is open; the next `get` opens it anew."""
        if self._value is not None:
            self._value = None
            self._open.remove(self)
            self._stack.close()

    @classmethod
    def close_all(cls) -> None:
        """Closes all that are open."""
        with ExitStack() as stack:
            for one in list(cls._open):
                stack.callback(one.close)
