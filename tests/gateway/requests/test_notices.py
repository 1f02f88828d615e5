"""What Redis is told with nobody waiting: while it is away, the oldest notices are dropped and the newest are kept."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as LostError

from gateway.requests.exchange.notices import Notices
from shared.contract.ids import GatewayId, SequenceId
from shared.contract.messages import StepFlag
from shared.contract.record import ENDED, FAILED
from shared.store.keyspace import Keyspace
from shared.store.script_values import Ending
from tests.scripted_mesh import ScriptedMesh


class Scripts:
    """While `lost`, each round trip loses its connection, and `sequences` come meanwhile. ended: what was told"""

    def __init__(self) -> None:
        self.lost = False
        self.notices: Notices
        self.sequences: list[Ending] = []
        self.ended: list[Ending] = []

    def end(self, some: list[Ending], **_: Any) -> list[Ending]:
        return some

    async def run_all(self, calls: list[list[Ending]], _: Any) -> list[None]:
        if self.lost:
            for each in self.sequences:
                self.notices.end(each, ENDED)
            raise LostError
        self.ended += [each for call in calls for each in call]
        return [None for _ in calls]


def ending(number: int) -> Ending:
    return Ending(SequenceId(f"model/1/{number}"), "")


async def test_a_full_queue_drops_its_oldest_notices_when_a_round_trip_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.requests.exchange.notices.UNTOLD_MAX", 4)
    scripts: Any = Scripts()
    scripts.notices = notices = Notices(scripts, Keyspace("test"), GatewayId("g"))
    for number in range(3):
        notices.end(ending(number), ENDED)
    scripts.lost, scripts.sequences = True, [ending(3), ending(4)]
    with pytest.raises(LostError):
        await notices._depart()
    scripts.lost = False
    await notices._depart()

    assert [ending(number) for number in (1, 2, 3, 4)] == scripts.ended


@pytest.mark.leaves_sequences
async def test_who_waits_for_a_first_slot_hears_that_its_run_was_abandoned_and_runs_if_it_was_cut_off(
    redis: Any, keys: Keyspace
) -> None:
    mesh = ScriptedMesh(redis, keys, "state")
    await mesh.open()
    notices = Notices(mesh.scripts, keys, GatewayId("g"))
    abandoned, cut_off = (mesh.submission(number, {}, StepFlag.START) for number in (1, 2))
    for step, tombstone in ((abandoned, FAILED), (cut_off, ENDED)):
        await mesh.submit(step)
        notices.end(Ending(step.sequence, ""), tombstone)
    await notices._depart()

    assert "another step of the ensemble could not go on" == (await mesh.reply(abandoned)).error
    assert "w" == (await mesh.record(2))["st"]
