"""`seqmesh drain --list`: what it says of executors. Draining itself is tested in `tests/mesh/test_moving.py`."""

from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner

from deploy.operate.drain import ListedExecutor, command, lines_of, table
from deploy.operate.operating import ExecutorHolding
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, ServedModel
from shared.store.membership import Member

SERVED = ServedModel("sum", "1", 1, 4)
REGISTRATION = ExecutorRegistration(ExecutorId("executor-1-ab"), "executor-1", "host", 1, 1, models=(SERVED,))
CLOSING = msgspec.structs.replace(REGISTRATION, models=(msgspec.structs.replace(SERVED, closing=True),))
LEAVING = msgspec.structs.replace(REGISTRATION, leaving=True)


@pytest.mark.parametrize(
    ("registration", "alive", "drained", "state"),
    [
        (REGISTRATION, True, [], "serving"),
        (REGISTRATION, True, ["executor-2"], "serving"),
        (REGISTRATION, True, ["executor-1"], "asked"),
        (REGISTRATION, True, ["executor-1-ab"], "asked"),
        (CLOSING, True, ["executor-1"], "closing"),
        (LEAVING, True, ["executor-1"], "leaving"),
        (REGISTRATION, False, ["executor-1"], "dead"),
    ],
)
def test_an_executor_that_was_asked_is_shown_so_until_it_has_heard(
    registration: ExecutorRegistration, drained: list[str], state: str, *, alive: bool
) -> None:
    line, *_ = lines_of([ExecutorHolding(Member(registration, alive), {"sum": 3})], drained)
    _, row = table([line]).splitlines()

    assert ListedExecutor("executor-1", "executor-1-ab", state, {"sum": 3}) == line
    assert ["executor-1", "executor-1-ab", state, "3", "sum", "3"] == row.split()


def test_a_drained_name_without_an_executor_is_shown() -> None:
    """A process that is started under it takes nothing."""
    assert [ListedExecutor("executor-9", "", "drained", {})] == lines_of([], ["executor-9"])


@pytest.mark.parametrize("drained", ["executor-1", "executor-1-ab"])
def test_an_executor_is_shown_once_when_it_is_drained_and_its_registration_still_there(drained: str) -> None:
    gone = ExecutorHolding(Member(LEAVING, alive=True), {})

    assert [ListedExecutor(drained, "", "drained", {})] == lines_of([gone], [drained])


@pytest.mark.parametrize("also", ["executor-1", "--undo"])
def test_a_list_drains_nobody(also: str) -> None:
    result = CliRunner().invoke(command, ["--list", also])

    assert 2 == result.exit_code
    assert "--list shows every executor, and drains none" in result.output
