"""Groups of tests: who is in one, and what becomes of what they share."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.groups import SHARED_MESHES, Shared, group_of, in_groups

ROOT = Path(__file__).parents[1]


def test_files_that_share_a_mesh_are_one_group_and_every_other_file_is_its_own() -> None:
    first, second, *_ = SHARED_MESHES["shared_victim"]

    assert group_of(f"{first}::test_a") == group_of(f"{second}::TestB::test_b[x::y]")
    assert group_of("tests/conformance/test_a.py::test_a") == group_of("tests/conformance/test_b.py::test_b")
    assert "tests/test_names.py" == group_of("tests/test_names.py::test_a")


def test_this_run_goes_group_by_group(request: pytest.FixtureRequest) -> None:
    items = request.session.items

    assert items == in_groups(items)


@pytest.mark.parametrize("path", sorted({path for paths in SHARED_MESHES.values() for path in paths}))
def test_what_is_named_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_what_is_shared_is_opened_once_and_closed_behind_the_last_one() -> None:
    events: list[str] = []

    @contextmanager
    def opened() -> Generator[int]:
        events.append("opened")
        yield len(events)
        events.append("closed")

    with Shared(opened) as shared:
        assert (1, 1) == (shared.get(), shared.get())
        shared.close()
        shared.close()
        assert ["opened", "closed"] == events
        assert 3 == shared.get()
    assert ["opened", "closed"] * 2 == events
