"""A model's live sequences and its executors' slots, as Redis has them."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.models.occupancy import Occupancy, Slots, read_occupancies
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, ServedModel, StepFlag
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.waiting_line import read_lines
from tests.scripted_mesh import ScriptedMesh

ONE = {"INPUT": np.full((1, 1), 1, np.int32)}


def registered(executor: str, name: str, *models: ServedModel) -> ExecutorRegistration:
    return ExecutorRegistration(ExecutorId(executor), name, "h", 1, 1, models)


@pytest.mark.leaves_sequences
async def test_slots_are_told_by_executor_over_its_versions_and_lives(redis: Redis, key_prefix: str) -> None:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 3), "sum")
    await mesh.open()
    old, new, other = (ExecutorId(name) for name in ("a-1", "a-2", "b-1"))
    for number in range(7):
        await mesh.submit(mesh.submission(number, ONE, StepFlag.START))
    for number, owner in enumerate((old, new, new, other)):
        await mesh.assign(number, owner)
    executors = [
        registered(old, "a", ServedModel("sum", "1", 2, 4)),
        registered(new, "a", ServedModel("sum", "1", 2, 4), ServedModel("sum", "2", 1, 3)),
        registered(other, "b", ServedModel("sum", "1", 1, 4), ServedModel("plain", "1", 1, 0)),
        registered("c-1", "c", ServedModel("plain", "1", 1, 0)),
    ]

    found = await read_occupancies(redis, mesh.keys, ["sum", "unserved"], executors)

    assert {"a": Slots(19, 3), "b": Slots(4, 1)} == found["sum"].slots
    assert Occupancy() == found["unserved"]
    assert 3 == (await read_lines(redis, mesh.keys, ["sum"]))["sum"].first
    assert {} == await read_occupancies(redis, mesh.keys, [], executors)
