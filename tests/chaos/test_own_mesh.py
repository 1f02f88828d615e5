"""A private mesh is started again when a port was taken before it could listen, and for no other reason."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from deploy.chaos.own_mesh import START_ATTEMPTS, started
from deploy.launcher import LauncherError


@pytest.mark.parametrize(
    ("complaints", "starts", "fails"),
    [
        ([], 1, False),
        (["gRPC cannot listen on 127.0.0.1:9"], 2, False),
        (["HTTP cannot listen on 127.0.0.1:9"] * 9, START_ATTEMPTS, True),
        (["the model has no version"], 1, True),
    ],
)
def test_a_taken_port_is_tried_again_with_another(complaints: list[str], starts: int, fails: bool) -> None:
    begun: list[int] = []

    @contextmanager
    def mesh() -> Generator[Any]:
        begun.append(1)
        if len(begun) <= len(complaints):
            raise LauncherError(complaints[len(begun) - 1])
        yield "a mesh"

    with contextlib.ExitStack() as stack:
        if fails:
            with pytest.raises(LauncherError):
                started(stack, mesh)
        else:
            assert "a mesh" == cast("Any", started(stack, mesh))
    assert starts == len(begun)
