"""The clients play every sequence to its end through gateways that break, refuse and forget to answer; a mesh in
memory keeps the promises, or breaks one on purpose, which the checker must find."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast
from unittest.mock import Mock

import pytest

from deploy.chaos import load as load_module
from deploy.chaos.checker import Sort, Strikes, check
from deploy.chaos.clients import BrokenError, Gateway, RefusedError
from deploy.chaos.fold import BEGINNING, FoldState, after
from deploy.chaos.history import AttemptOutcome, SequenceHistory, Strike
from deploy.chaos.library import LibraryPlayer
from deploy.chaos.load import SET_BACK, ClientLoad, Clock, Player, Score
from deploy.chaos.scripts import Script
from seqmesh_client import StepOutputs
from tests.chaos.histories import script

ALL_ALONG = Strikes([Strike(0, "kill-gateway", 0.0, 1e9), Strike(1, "kill-redis", 0.0, 1e9)])


class MeshInMemory:
    """Runs every step once, in order. chance: of each mishap; forgetful: runs a repeated step again."""

    def __init__(self, chance: random.Random, *, mishaps: float, forgetful: bool = False) -> None:
        self.chance = chance
        self.mishaps = mishaps
        self.forgetful = forgetful
        self.states: dict[int | str, list[FoldState]] = {}

    def accept(self, told: Script, step: int) -> FoldState:
        """The step's answer. Raises when it comes too early."""
        states = self.states.setdefault(told.correlation_id, [BEGINNING])
        if step < len(states) and self.forgetful:
            states[-1] = after(states[-1], told.values[step - 1])
            return states[-1]
        if step > len(states):
            raise RefusedError("too early", "wrong_step", len(states) - 1)
        if step == len(states):
            states.append(after(states[-1], told.values[step - 1]))
        return states[step]

    def mishap(self) -> bool:
        return self.chance.random() < self.mishaps


class SessionInMemory:
    """A connection that may break before the mesh has the step, or after."""

    def __init__(self, mesh: MeshInMemory) -> None:
        self.mesh = mesh
        self.broken = False

    def send(self, told: Script, step: int) -> asyncio.Future[FoldState]:
        answer: asyncio.Future[FoldState] = asyncio.get_running_loop().create_future()
        self.broken = self.broken or self.mesh.mishap()
        if self.broken:
            answer.set_exception(BrokenError("before"))
            return answer
        if self.mesh.mishap():
            answer.set_exception(RefusedError("Redis cannot be reached"))
            self.broken = True
            return answer
        try:
            state = self.mesh.accept(told, step)
        except RefusedError as refused:
            answer.set_exception(refused)
            return answer
        if self.mesh.mishap():
            self.broken = True
            answer.set_exception(BrokenError("after"))
        elif not self.mesh.mishap():
            asyncio.get_running_loop().call_soon(lambda: answer.done() or answer.set_result(state))
        return answer

    async def close(self) -> None: ...

    async def hang_up(self) -> None: ...


class GatewayInMemory:
    def __init__(self, mesh: MeshInMemory) -> None:
        self.mesh = mesh

    def session(self, protocol: str) -> SessionInMemory:
        return SessionInMemory(self.mesh)


def player_of(gateways: Sequence[Gateway]) -> Callable[[Script, Clock, Score], Player]:
    return lambda script, clock, score: Player(script, gateways, clock, score, 1)


async def played(
    mesh: MeshInMemory, scripts: Sequence[Script], monkeypatch: pytest.MonkeyPatch
) -> list[SequenceHistory]:
    """What happened to these sequences, all played at once."""
    monkeypatch.setattr(load_module, "RETRY_PAUSE_S", 0.0)
    kept: list[SequenceHistory] = []
    gateways = cast("list[Gateway]", [GatewayInMemory(mesh), GatewayInMemory(mesh)])
    load = ClientLoad(player_of(gateways), Clock(), lambda index: scripts[index], kept.append)
    await asyncio.gather(*(load.play(one) for one in scripts))
    assert len(scripts) == load.score.sequences
    return kept


class SilentSequence:
    """A client's sequence that gets no answer."""

    token = "sm1.silent"
    answered = 0

    def __init__(self) -> None:
        self.waits, self.left = asyncio.Event(), False

    async def steps(self, *_: object, **__: object) -> AsyncIterator[StepOutputs]:
        self.waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left = True
        yield cast("StepOutputs", {})

    def hang_up(self) -> None: ...


async def test_a_client_of_the_library_that_is_cancelled_leaves_no_task_behind() -> None:
    sequence = SilentSequence()
    library = Mock(sequence=Mock(return_value=sequence), resume=Mock(return_value=sequence))
    playing = asyncio.create_task(LibraryPlayer(script([1, 2, 3]), library, Clock(), Score(), seed=1).play())
    await sequence.waits.wait()

    playing.cancel()
    await asyncio.wait((playing,))

    assert playing.cancelled()
    assert sequence.left
    assert {asyncio.current_task()} == asyncio.all_tasks()


def scripts_of(chance: random.Random, **changes: Any) -> list[Script]:
    return [
        script(
            [chance.getrandbits(40) for _ in range(20)],
            index=index,
            correlation_id=index,
            window=1 + index % 4,
            patience_s=0.05,
            hang_ups=(3, 11) if index % 3 == 0 else (),
            **changes,
        )
        for index in range(12)
    ]


async def test_every_step_is_answered_rightly_whatever_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    kept = await played(MeshInMemory(chance, mishaps=0.05), scripts_of(chance), monkeypatch)

    assert [] == [found for told in kept for found in check(told, ALL_ALONG)]
    assert [""] * 12 == [told.forsaken for told in kept]
    outcomes = {attempt.outcome for told in kept for attempt in told.attempts}
    assert set(AttemptOutcome) == outcomes, "every kind of mishap has happened"
    assert all(20 == len({a.step for a in told.attempts if a.outcome is AttemptOutcome.ANSWERED}) for told in kept)


async def test_a_mesh_that_runs_retries_again_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(6)
    kept = await played(MeshInMemory(chance, mishaps=0.05, forgetful=True), scripts_of(chance), monkeypatch)

    assert Sort.DOUBLED in {found.sort for told in kept for found in check(told, ALL_ALONG)}


async def test_a_sequence_that_the_mesh_says_is_lost_is_given_up_and_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy(MeshInMemory):
        def accept(self, told: Script, step: int) -> FoldState:
            if step == 5:
                raise RefusedError("its executor died", "lost", 4)
            return super().accept(told, step)

    (told,) = await played(Lossy(random.Random(1), mishaps=0.0), [script(range(9))], monkeypatch)

    assert "lost" == told.forsaken
    assert [Sort.LOST] == [found.sort for found in check(told, ALL_ALONG)]


async def test_a_sequence_that_the_mesh_has_set_back_is_given_up_and_allowed_only_after_a_stale_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SetBack(MeshInMemory):
        def accept(self, told: Script, step: int) -> FoldState:
            if step == 5:
                del self.states[told.correlation_id][3:]
            return super().accept(told, step)

    (told,) = await played(SetBack(random.Random(1), mishaps=0.0), [script(range(9))], monkeypatch)
    promoted = Strikes([Strike(0, "promote-replica", 0.0, 1e9)])

    assert SET_BACK == told.forsaken
    assert [Sort.UNEXPLAINED] == [found.sort for found in check(told, ALL_ALONG)]
    assert [] == check(told, promoted)


async def test_a_run_that_ends_closes_its_sequences_with_their_next_step() -> None:
    """So no slot stays taken; what was played is a shorter sequence, and whole."""
    kept: list[SequenceHistory] = []
    mesh = MeshInMemory(random.Random(1), mishaps=0.0)
    load = ClientLoad(
        player_of(cast("list[Gateway]", [GatewayInMemory(mesh)])),
        Clock(),
        lambda index: script(range(1000), index=index, correlation_id=index, pause_s=0.001, ends=False, window=4),
        kept.append,
    )
    clients = [asyncio.create_task(load.client()) for _ in range(3)]
    async with asyncio.timeout(60):
        while load.score.answered < 12:
            await asyncio.sleep(0.001)
        load.stop()
        await asyncio.gather(*clients)

    assert 3 == len(kept)
    for told in kept:
        assert told.script.ends
        assert len(told.script.values) < 1000
        assert [] == check(told, Strikes([]))
