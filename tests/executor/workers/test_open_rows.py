"""Answers on their way from a model's threads to Redis: numbers, bounds, ends, and requests that are over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from executor.engine.base import RowError, RowResult
from executor.workers import open_rows
from executor.workers.open_rows import ROW_ANSWERS_MAX, Numbered, OpenRow, OpenRows
from shared.contract.errors import Code
from shared.store.work_scripts import WorkHeld
from tests.executor.patience import until

ANSWER = RowResult(())


class Stage:
    """Rows whose writes the test lets pass. written: (key, numbers) of each write"""

    def __init__(self) -> None:
        self.written: list[tuple[str, list[int]]] = []
        self.ended: list[OpenRow[str]] = []
        self.passing = asyncio.Event()
        self.passing.set()
        self.held = WorkHeld.HELD
        self.rows = OpenRows(self._write, self.ended.append, looks=False)

    async def _write(self, requests: Sequence[tuple[str, Sequence[Numbered]]]) -> Sequence[WorkHeld]:
        await self.passing.wait()
        self.written += [(key, [number for number, _ in answers]) for key, answers in requests]
        return [self.held] * len(requests)

    def open(self, key: str = "r", *, muted: bool = False) -> OpenRow[str]:
        return self.rows.open(key, lambda result: b"%d" % result.number, muted=muted)

    @property
    def numbers(self) -> list[int]:
        return [number for _, numbers in self.written for number in numbers]


@asynccontextmanager
async def staged() -> AsyncGenerator[Stage]:
    stage = Stage()
    running = asyncio.create_task(stage.rows.run())
    try:
        yield stage
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_a_request_ends_when_its_batch_has_ended_and_every_answer_is_written() -> None:
    async with staged() as stage:
        row = stage.open()
        await asyncio.to_thread(lambda: [row.send(ANSWER) for _ in range(3)])
        row.end(ANSWER)
        await until(lambda: stage.numbers == [1, 2, 3])
        assert [] == stage.ended

        stage.rows.conclude(row, "finished")
        await until(lambda: stage.ended)

        assert row.last is not None
        assert (4, "finished", 0) == (row.last.number, row.finished, len(stage.rows))


async def test_a_last_answer_waits_for_those_before_it_to_be_written() -> None:
    async with staged() as stage:
        stage.passing.clear()
        row = stage.open()
        row.send(ANSWER)
        row.end(ANSWER)
        stage.rows.conclude(row, "finished")
        await asyncio.sleep(0.05)
        assert [] == stage.ended

        stage.passing.set()
        await until(lambda: stage.ended)


async def test_a_thread_waits_that_answers_faster_than_is_written() -> None:
    async with staged() as stage:
        stage.passing.clear()
        row, sent = stage.open(), list[int]()

        def answer() -> None:
            for number in range(3 * ROW_ANSWERS_MAX):
                row.send(ANSWER)
                sent.append(number)

        thread = threading.Thread(target=answer)
        thread.start()
        await until(lambda: len(sent) >= ROW_ANSWERS_MAX)
        await asyncio.sleep(0.05)
        assert len(sent) <= 2 * ROW_ANSWERS_MAX

        stage.passing.set()
        await asyncio.to_thread(thread.join)
        await until(lambda: stage.numbers == list(range(1, 3 * ROW_ANSWERS_MAX + 1)))


async def test_a_request_of_another_owner_lets_its_thread_go_and_moves_no_state() -> None:
    async with staged() as stage:
        stage.held = WorkHeld.GONE
        row = stage.open()
        row.send(ANSWER)
        await until(lambda: row.is_cancelled)

        kept: list[int] = []
        for _ in range(2 * ROW_ANSWERS_MAX):
            row.send(ANSWER)
        row.end(ANSWER, lambda: kept.append(1))

        assert ([], [], 0) == (kept, stage.ended, stage.rows.bytes)


async def test_a_cancelled_request_drops_answers_until_the_model_ends_it() -> None:
    async with staged() as stage:
        row = stage.open()
        row.cancel()
        row.send(ANSWER)
        row.end(RowError(Code.CANCELLED, "stopped"))
        stage.rows.conclude(row, "finished")
        await until(lambda: stage.ended)

    assert [] == stage.written


async def test_a_step_that_is_run_again_for_its_state_writes_nothing() -> None:
    async with staged() as stage:
        row = stage.open(muted=True)
        row.send(ANSWER)
        row.end(ANSWER)
        stage.rows.conclude(row, "finished")
        await until(lambda: stage.ended)

    assert [] == stage.written


async def test_only_the_first_last_answer_counts() -> None:
    async with staged() as stage:
        row = stage.open()
        row.end(ANSWER)
        row.end(RowError(Code.INTERNAL, "too late"))
        row.send(ANSWER)

        assert isinstance(row.last, RowResult)
        assert (1, 0) == (row.last.number, row.count)


async def test_an_endless_answerer_does_not_hold_up_the_others() -> None:
    async with staged() as stage:
        endless, other = stage.open("endless"), stage.open("other")
        stop = threading.Event()

        def answer() -> None:
            while not stop.is_set():
                endless.send(ANSWER)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            await asyncio.to_thread(other.send, ANSWER)
            other.end(ANSWER)
            stage.rows.conclude(other, "finished")
            await until(lambda: other in stage.ended)
        finally:
            stop.set()
            endless.cancel()
            await asyncio.to_thread(thread.join)


async def test_a_request_without_an_answer_is_asked_for_however_many_answers_others_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nobody tells its model that the caller has gone."""
    monkeypatch.setattr(open_rows, "LOOK_S", 0.02)
    asked: list[str] = []

    async def write(requests: Sequence[tuple[str, Sequence[Numbered]]]) -> Sequence[WorkHeld]:
        await asyncio.sleep(0)
        asked.extend(key for key, answers in requests if not answers)
        return [WorkHeld.CANCELLED if key == "quiet" else WorkHeld.HELD for key, _ in requests]

    rows: OpenRows[str] = OpenRows(write, lambda _: None, looks=True)
    running = asyncio.create_task(rows.run())
    quiet, busy = (rows.open(key, lambda _: b"answer") for key in ("quiet", "busy"))

    def another_answer() -> bool:
        busy.send(ANSWER)
        return quiet.is_cancelled

    await until(another_answer)
    assert {"quiet"} <= set(asked)

    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_a_lone_request_without_an_answer_is_asked_for_and_nothing_is_while_none_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_rows, "LOOK_S", 0.02)
    waits: list[float | None] = []
    timeout_at = asyncio.timeout_at

    def waiting(when: float | None) -> asyncio.Timeout:
        waits.append(when)
        return timeout_at(when)

    async def write(requests: Sequence[tuple[str, Sequence[Numbered]]]) -> Sequence[WorkHeld]:
        return [WorkHeld.CANCELLED for _ in requests]

    monkeypatch.setattr(asyncio, "timeout_at", waiting)
    rows: OpenRows[str] = OpenRows(write, lambda _: None, looks=True)
    running = asyncio.create_task(rows.run())
    await asyncio.sleep(0.01)
    assert [None] == waits

    row = rows.open("r", lambda _: b"answer")
    await until(lambda: row.is_cancelled)

    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_an_executor_that_leaves_waits_for_last_answers_but_not_for_ever(monkeypatch: object) -> None:
    patch = getattr(monkeypatch, "setattr")  # noqa: B009 - typed loosely
    async with staged() as stage:
        prompt = stage.open()
        prompt.end(ANSWER)
        stage.rows.conclude(prompt, "finished")
        await stage.rows.quiet()
        assert [prompt] == stage.ended

        patch(open_rows, "FINISH_S", 0.05)
        slow = stage.open()
        await stage.rows.quiet()

        assert slow.is_cancelled
        assert 0 == len(stage.rows)
