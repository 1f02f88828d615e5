"""Round trips: what gathers during one goes with the next, and what failed is sent again after a pause."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from shared.store import round_trips
from shared.store.connections import redis_client
from shared.store.connections.redis_py import UnfitServerError
from shared.store.round_trips import RoundTrips, put_back


@pytest.fixture(autouse=True)
def paused_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many failures in a row each pause was for; the pauses last no time."""
    asked: list[int] = []

    def no_pause_s(failures: int) -> float:
        asked.append(failures)
        return redis_client.pause_s(failures) * 0

    monkeypatch.setattr(round_trips, "pause_s", no_pause_s)
    return asked


class Scripted:
    """Scripts and a link in one: each round trip ends when it is told to, and tells what it carried."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.carried: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.answers: asyncio.Queue[list[Any] | Exception] = asyncio.Queue()

    async def connect(self) -> None:
        self.told.append("connect")

    async def close(self) -> None:
        self.told.append("close")

    async def run_all(self, calls: list[Any], link: Any) -> list[Any]:
        assert link is self
        self.carried.put_nowait(list(calls))
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


class User:
    """Sends numbers; what failed goes first, with what came meanwhile."""

    def __init__(self, scripted: Any) -> None:
        self.trips = RoundTrips(scripted, scripted, "numbers")
        self.waiting: list[Any] = []
        self.done: list[Any] = []

    def put(self, number: Any) -> None:
        self.waiting.append(number)
        self.trips.due()

    async def depart(self) -> bool:
        sending = list(self.waiting)
        outcomes = await self.trips.send(sending)
        failed = [one for one, outcome in zip(sending, outcomes, strict=True) if isinstance(outcome, Exception)]
        self.done += [one for one in sending if one not in failed]
        self.waiting[: len(sending)] = failed
        return not failed


@asynccontextmanager
async def running(trips: RoundTrips, depart: Callable[[], Awaitable[bool]]) -> AsyncGenerator[None]:
    task = asyncio.create_task(trips.run(depart))
    async with asyncio.timeout(60):
        yield
    task.cancel()
    assert [asyncio.CancelledError] == [type(end) for end in await asyncio.gather(task, return_exceptions=True)]


async def test_what_gathers_during_a_round_trip_goes_with_the_next() -> None:
    scripted = Scripted()
    user: Any = User(scripted)
    async with running(user.trips, user.depart):
        user.put(1)
        assert [1] == await scripted.carried.get()
        user.put(2)
        user.put(3)
        assert scripted.carried.empty(), "one is outstanding at a time"
        scripted.answers.put_nowait(["yes"])
        assert [2, 3] == await scripted.carried.get()
        scripted.answers.put_nowait(["yes", "yes"])

    assert ["connect", "connect", "close"] == scripted.told


async def test_what_was_lost_or_failed_is_sent_again_after_a_pause_for_each_failure_in_a_row(
    paused_for: list[int],
) -> None:
    scripted = Scripted()
    user: Any = User(scripted)
    failures = (RedisConnectionError("lost"), OSError("no route"), [UnfitServerError("READONLY"), "yes"])
    async with running(user.trips, user.depart):
        user.put(1)
        user.put(2)
        for failure in failures:
            assert [1, 2] == await scripted.carried.get()
            scripted.answers.put_nowait(failure)
        assert [1] == await scripted.carried.get()
        scripted.answers.put_nowait(["yes"])
        user.put(3)
        assert [3] == await scripted.carried.get()
        scripted.answers.put_nowait(RedisConnectionError("lost"))
        assert [3] == await scripted.carried.get()
        scripted.answers.put_nowait(["yes"])

    assert [1, 2, 3, 1] == paused_for
    assert [2, 1] == user.done[:2]


async def test_of_calls_whose_results_nobody_awaits_a_refusal_is_logged_and_a_loss_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scripted: Any = Scripted()
    trips: Any = RoundTrips(scripted, scripted, "numbers")
    scripted.answers.put_nowait([ResponseError("no"), "yes"])
    await trips.tell([1, 2])
    assert ["redis refused a script"] == [record.message for record in caplog.records]

    scripted.answers.put_nowait(["yes", UnfitServerError("READONLY")])
    with pytest.raises(UnfitServerError):
        await trips.tell([1, 2])


async def test_a_server_that_stays_away_for_an_hour_ends_nothing() -> None:
    tries, is_back = 0, asyncio.Event()

    async def depart() -> bool:
        nonlocal tries
        tries += 1
        if tries < 3600:
            raise RedisConnectionError("away")
        is_back.set()
        return True

    scripted: Any = Scripted()
    trips = RoundTrips(scripted, None, "numbers")
    async with running(trips, depart):
        trips.due()
        await is_back.wait()


async def test_a_mistake_of_ours_ends_it_and_closes_the_link() -> None:
    scripted: Any = Scripted()
    trips = RoundTrips(scripted, scripted, "numbers")

    async def depart() -> bool:
        raise AssertionError("lost count")

    trips.due()
    with pytest.raises(AssertionError, match="lost count"):
        await trips.run(depart)

    assert ["close"] == scripted.told


@pytest.mark.parametrize(
    ("came", "kept"), [([], [0, 1, 2]), ([3], [0, 1, 2, 3]), ([3, 4], [1, 2, 3, 4]), ([3, 4, 5, 6], [3, 4, 5, 6])]
)
def test_what_is_put_back_into_a_full_queue_drops_the_oldest(came: list[int], kept: list[int]) -> None:
    queue = deque(came, maxlen=4)
    put_back(queue, [0, 1, 2])

    assert kept == list(queue)
