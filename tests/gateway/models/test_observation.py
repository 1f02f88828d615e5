"""What the metrics say of the executors."""

from __future__ import annotations

import pytest

from gateway.models.observation import EXECUTOR_STATES, state_of
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration
from shared.store.membership import Member


@pytest.mark.parametrize(
    ("leaving", "alive", "state"),
    [(False, True, "serving"), (True, True, "leaving"), (True, False, "leaving"), (False, False, "lost")],
)
def test_an_executor_is_lost_only_if_it_did_not_leave(*, leaving: bool, alive: bool, state: str) -> None:
    registration = ExecutorRegistration(ExecutorId("e"), "e", "host", 1, 1, leaving=leaving)

    assert state == state_of(Member(registration, alive=alive))
    assert state in EXECUTOR_STATES
