"""What callers hear, and what runs, when connections break, Redis goes away, callers leave and gateways die."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

import gateway.requests.exchange.replies
from gateway.models.catalog import Catalog
from gateway.parts import GatewayParts
from gateway.requests.exchange.departures import LEFT_BYTES_MAX
from gateway.requests.exchange.replies import Replies
from gateway.requests.infer_call import InferCall
from gateway.settings import GatewaySettings
from shared.contract.errors import Code, Reason, RequestError, SequenceError, UnavailableError
from shared.contract.ids import GatewayId, ShardId
from shared.contract.tensors import Tensor
from shared.store.commands import Redis
from shared.store.connections.link import Link
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import UnfitServerError
from shared.store.connections.server_run import ServerRun
from shared.store.keyspace import Keyspace
from shared.store.reading import clock_ms
from shared.store.script_sender import Call
from shared.store.scripts import Scripts
from tests.embedded_redis import EmbeddedRedis
from tests.gateway.fake_executor import FakeExecutor, RunningGateway
from tests.gateway.requests.portless import Proxy, departures_of, is_submit, settled, step, total, without_ports


@pytest.mark.parametrize("identity", [{"request_id": "r"}, {"expected_step": 2}], ids=["request id", "step number"])
async def test_step_that_can_be_told_from_its_first_attempt_survives_a_lost_reply(
    behind_proxy: GatewayParts, proxy: Proxy, executor: FakeExecutor, identity: dict[str, Any]
):
    """The script ran, its reply was lost: the step is sent again by itself and runs once."""
    await behind_proxy.inference.submit(step(1, start=True, request_id="first"))
    proxy.cut_after = is_submit

    answer = await behind_proxy.inference.submit(step(2, **identity))

    assert total(answer) == 3
    assert len(executor.received) == 2


@pytest.fixture
def many_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gateways that begin behind this."""
    monkeypatch.setattr(gateway.requests.exchange.replies, "HEARTBEAT_S", 0.05)


async def test_step_without_identity_fails_with_what_is_unknown_and_the_sequence_goes_on(
    behind_proxy: GatewayParts, proxy: Proxy, executor: FakeExecutor
):
    await behind_proxy.inference.submit(step(1, start=True))
    await executor.pause()
    proxy.cut_after = is_submit

    with pytest.raises(UnavailableError) as caught:
        await behind_proxy.inference.submit(step(2))
    executor.paused.clear()

    assert "it is not known whether the step of sequence 1 of model 'running_sum' was accepted" in caught.value.message
    assert "give every step a request id" in caught.value.message
    # The proxy did pass it on, so it counts.
    assert total(await behind_proxy.inference.submit(step(4))) == 7


async def test_connections_that_were_cut_while_idle_harm_no_step(behind_proxy: GatewayParts, proxy: Proxy):
    """Nothing had been sent: even a step that cannot be told from its first attempt is sent on a new one."""
    await behind_proxy.inference.submit(step(1, start=True))
    for count, value in enumerate((2, 4), 1):
        await settled(behind_proxy, count)
        idle: Any = departures_of(behind_proxy)._link
        proxy.cut_all()
        async with asyncio.timeout(60):
            while not idle._connection._reader.at_eof():
                await asyncio.sleep(0.005)

        assert (1 if value == 2 else 3) + value == total(await behind_proxy.inference.submit(step(value)))


async def test_requests_wait_while_redis_is_away_for_a_moment(behind_proxy: GatewayParts, proxy: Proxy):
    proxy.refuses = True
    proxy.cut_all()
    await asyncio.sleep(0.05)
    waiting = behind_proxy.inference.submit(step(1, start=True, request_id="a"))
    await asyncio.sleep(0.2)
    assert not waiting.done()

    proxy.refuses = False

    assert total(await waiting) == 1


@pytest.mark.settings(request_timeout_ms=50)
async def test_a_step_that_redis_was_never_asked_for_may_be_sent_again_whatever_ends_its_wait(
    behind_proxy: GatewayParts, proxy: Proxy
) -> None:
    """Also one that nothing tells from its first attempt: there was none."""
    proxy.refuses = True
    proxy.cut_all()
    with pytest.raises(UnavailableError, match=r"^50 ms were over before the request was sent: send it again$"):
        await behind_proxy.inference.submit(step(1, start=True))
    last = behind_proxy.inference.submit(step(1, start=True))
    with pytest.raises(RedisConnectionError):
        await behind_proxy.replies._recover(behind_proxy.replies._keys.shards)
    behind_proxy.inference.give_up("the gateway has stopped")

    with pytest.raises(UnavailableError, match=r"^the gateway has stopped before the request was sent: send it again$"):
        await last
    proxy.refuses = False


async def test_requests_wait_for_redis_whatever_became_of_the_last_ones_that_lost_it(
    behind_proxy: GatewayParts, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    """An hour ago nothing was left to be sent again, so nobody has seen since that Redis was back."""
    await behind_proxy.inference.submit(step(1, start=True))
    proxy.cut_before = is_submit
    with pytest.raises(UnavailableError, match="it is not known"):
        await behind_proxy.inference.submit(step(2))
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600, time_ns=time.time_ns)
    monkeypatch.setattr("gateway.requests.exchange.departures.time", later)
    proxy.cut_before = is_submit

    assert 5 == total(await behind_proxy.inference.submit(step(4, request_id="a")))


async def test_callers_who_leave_while_redis_is_away_take_their_requests_with_them(
    behind_proxy: GatewayParts, proxy: Proxy
):
    """The gateway's bounds count callers who wait: what others have left must not pile up beside it."""
    inference, departures = behind_proxy.inference, departures_of(behind_proxy)

    def queued() -> int:
        return sum(map(len, departures._queues.values()))

    proxy.refuses = True
    proxy.cut_all()
    first = inference.submit(step(1, start=True, request_id="a"))
    async with asyncio.timeout(60):
        while queued():
            await asyncio.sleep(0.005)
    named = [inference.submit(step(2, number, start=True, request_id="a")) for number in range(2, 102)]
    unnamed = [inference.submit(step(3, number, start=True)) for number in range(102, 202)]
    assert 200 == queued()

    for answer in (*named[1:], *unnamed[1:]):
        answer.cancel()
    await asyncio.sleep(0)

    # Of each shard's no more than every second one is nobody's.
    assert queued() <= 4
    proxy.refuses = False
    assert [1, 2, 3] == [total(await answer) for answer in (first, named[0], unnamed[0])]


async def test_large_requests_of_callers_who_leave_do_not_gather_while_redis_is_away(
    behind_proxy: GatewayParts, proxy: Proxy
) -> None:
    """However many small ones of others wait: what was left counts no longer, and would fill the gateway."""
    inference, queues = behind_proxy.inference, departures_of(behind_proxy)._queues.values()
    proxy.refuses = True
    proxy.cut_all()
    first = inference.submit(floats(1))
    async with asyncio.timeout(60):
        while any(queues):
            await asyncio.sleep(0.005)
    small = [inference.submit(floats(1)) for _ in range(200)]
    for _ in range(100):
        inference.submit(floats(1 << 18)).cancel()
    await asyncio.sleep(0)

    assert sum(pending.size for queue in queues for pending in queue) < LEFT_BYTES_MAX + (2 << 20)
    for answer in (first, *small):
        answer.cancel()


def floats(count: int) -> InferCall:
    tensor = Tensor("INPUT0", "FP32", (1, count), bytes(4 * count))
    return InferCall("echo", inputs=(tensor,))


async def test_a_redis_that_stays_away_is_an_error_and_not_a_wait(
    behind_proxy: GatewayParts, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.requests.exchange.departures.PATIENCE_S", 0.1)
    proxy.refuses = True
    proxy.cut_all()
    await asyncio.sleep(0.05)

    with pytest.raises(UnavailableError, match="cannot be reached"):
        await behind_proxy.inference.submit(step(1, start=True, request_id="a"))


async def test_a_step_behind_one_that_is_sent_again_does_not_wait_for_another_attempt_at_a_silent_redis(
    behind_proxy: GatewayParts, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    await behind_proxy.inference.submit(step(1, start=True, request_id="first"))
    monkeypatch.setattr("gateway.requests.exchange.departures.PATIENCE_S", 0.01)
    link: Any = departures_of(behind_proxy)._link
    tried, silences = asyncio.Event(), asyncio.Semaphore(0)

    async def silent() -> None:
        tried.set()
        await silences.acquire()
        raise RedisConnectionError("no answer")

    def is_lost(chunk: bytes) -> bool:
        if is_submit(chunk):
            monkeypatch.setattr(link, "connect", silent)
        return is_submit(chunk)

    proxy.cut_before = is_lost
    sent = behind_proxy.inference.submit(step(2, request_id="sent"))
    await tried.wait()
    behind = behind_proxy.inference.submit(step(3, request_id="behind"))
    await asyncio.sleep(0.02)
    silences.release()  # one attempt ends; the next one would not

    for answer in (sent, behind):
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await answer


async def test_steps_of_one_turn_are_accepted_in_their_order_and_in_few_round_trips(parts: GatewayParts):
    answers = await asyncio.gather(*(parts.inference.submit(step(1, start=index == 0)) for index in range(300)))

    assert [total(answer) for answer in answers] == list(range(1, 301))
    assert parts.dispatch.round_trips <= 4


async def test_other_gateway_answers_the_retry_of_a_step_whose_gateway_died(
    gateway_settings: GatewaySettings, keys: Keyspace, executor: FakeExecutor
):
    """The first gateway dies with the step open; the retry elsewhere joins it, or gets the stored reply."""
    await executor.pause()
    async with without_ports(gateway_settings, keys) as first:
        lost = first.inference.submit(step(7, start=True, request_id="only"))
        await settled(first, 1)
    assert not lost.done()
    async with without_ports(gateway_settings, keys) as second:
        joined = second.inference.submit(step(7, start=True, request_id="only"))
        await settled(second, 1)
        executor.paused.clear()
        stored = [total(await joined), total(await second.inference.submit(step(7, start=True, request_id="only")))]

    assert stored == [7, 7]
    assert len(executor.received) == 1


@pytest.mark.parametrize("begins_anew", [False, True])
@pytest.mark.usefixtures("many_beats")
async def test_who_joined_a_step_is_told_when_its_record_is_removed(
    parts: GatewayParts,
    keys: Keyspace,
    executor: FakeExecutor,
    *,
    begins_anew: bool,
):
    """By hand, or because Redis evicted it. Only the record named who joined; another record under the id does not."""
    await parts.inference.submit(step(1, start=True, request_id="a"))
    await executor.pause()
    first = parts.inference.submit(step(2, request_id="b"))
    joined = [parts.inference.submit(step(2, request_id="b")) for _ in range(2)]
    await settled(parts, 4)
    record = keys.sequence(parts.replies.unanswered[0].sequence).record
    await asyncio.sleep(4 * gateway.requests.exchange.replies.HEARTBEAT_S)
    assert not any(one.done() for one in joined), "as long as the record is there"

    await executor.redis.unlink(record)
    again = parts.inference.submit(step(5, start=True, request_id="c")) if begins_anew else None

    for one in joined:
        with pytest.raises(SequenceError, match="was removed from Redis") as told:
            await one
        assert Reason.LOST == told.value.reason
    executor.paused.clear()
    assert again is None or 5 == total(await again)
    first.cancel()


@pytest.mark.usefixtures("many_beats")
async def test_who_waits_for_a_stateless_request_is_told_when_that_is_removed(
    parts: GatewayParts, keys: Keyspace, executor: FakeExecutor
):
    call = InferCall("echo", inputs=(Tensor("INPUT0", "FP32", (1, 1), bytes(4)),))
    await executor.pause()
    waiting = parts.inference.submit(call)
    await settled(parts, 1)
    await asyncio.sleep(4 * gateway.requests.exchange.replies.HEARTBEAT_S)
    assert not waiting.done(), "as long as it is there"

    await executor.redis.unlink(*keys.work_queue("echo", "1"))

    with pytest.raises(UnavailableError, match=r"the request was removed from Redis .* send it again"):
        await waiting
    executor.paused.clear()
    assert await parts.inference.submit(call)


@pytest.mark.parametrize("is_cut", [False, True], ids=["", "and Redis does not say that they are made again"])
@pytest.mark.usefixtures("many_beats")
async def test_lost_reply_streams_are_noticed_and_the_waiting_are_told(
    parts: GatewayParts,
    keys: Keyspace,
    executor: FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_cut: bool,
):
    create = Replies._create

    async def made(replies: Replies, shards: Sequence[ShardId], redis: Redis) -> None:
        await create(replies, shards, redis)
        if is_cut and replies.unanswered:
            raise RedisConnectionError("cut")

    monkeypatch.setattr(Replies, "_create", made)
    await executor.pause()
    waiting = parts.inference.submit(step(1, start=True))
    await settled(parts, 1)
    async for key in executor.commands.scan_iter(match=f"{keys.prefix}:*replies:*"):
        await executor.redis.unlink(key)

    with pytest.raises(UnavailableError, match="the gateway lost its replies"):
        await waiting
    executor.paused.clear()

    assert total(await parts.inference.submit(step(2))) == 3


async def test_reply_streams_are_kept_in_a_redis_without_memory(
    private_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gateway.requests.exchange.replies, "HEARTBEAT_S", 0.01)
    redis: Any = connect(private_server.url)
    keys, name = Keyspace(shards=1), GatewayId("g")
    replies = gateway.requests.exchange.replies.Replies(redis, keys, name)
    await replies.open(ServerRun())
    await redis.config_set("maxmemory", 1)
    beats = asyncio.create_task(replies.heartbeat())
    (shard,) = keys.shards
    for _ in range(3):
        await redis.pexpire(keys.replies(shard, name), 30_000)
        while await redis.pttl(keys.replies(shard, name)) <= 30_000:
            assert not beats.done()
            await asyncio.sleep(0.005)
    beats.cancel()
    await replies.close()
    await redis.aclose()


async def test_a_full_redis_refuses_what_is_new_and_is_no_news_with_every_request(
    private_server: EmbeddedRedis,
    gateway_settings: GatewaySettings,
    keys: Keyspace,
    monkeypatch: pytest.MonkeyPatch,
):
    told: list[str] = []

    def tell(event: str, /, **_: object) -> None:
        told.append(event)

    for level in ("error", "info"):
        monkeypatch.setattr(f"gateway.requests.exchange.departures.logs.{level}", tell)
    redis: Any = connect(private_server.url)
    executor = FakeExecutor(redis, keys)
    await executor.join()
    running = asyncio.create_task(executor.run())
    settings = dataclasses.replace(gateway_settings, redis_url=private_server.url)
    async with without_ports(settings, keys) as parts:
        await parts.inference.submit(step(1, start=True))
        for _ in range(2):
            told.clear()
            await redis.config_set("maxmemory", 1)
            for _ in range(3):
                with pytest.raises(UnavailableError, match="is full: try again later"):
                    await parts.inference.submit(step(2))
            await redis.config_set("maxmemory", 0)
            await parts.inference.submit(step(2))

            async with asyncio.timeout(60):
                while "redis has room again" not in told:
                    await asyncio.sleep(0.005)
            assert [line for line in told if line.startswith("redis")] == [
                "redis is full, new requests are refused: raise its maxmemory",
                "redis has room again",
            ]
        assert total(await parts.inference.submit(step(3))) == 8
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await redis.aclose()


@pytest.mark.parametrize("ahead_ms", [0, 3_600_000], ids=["clock goes on", "clock jumps ahead"])
@pytest.mark.parametrize("cut_again", [False, True], ids=["cut once", "cut twice"])
@pytest.mark.parametrize("ids_remembered", [64, 1], ids=["remembered", "forgotten"])
async def test_step_sent_again_after_another_gateways_step_does_not_run_twice(
    *,
    ids_remembered: int,
    cut_again: bool,
    ahead_ms: int,
    behind_proxy: GatewayParts,
    proxy: Proxy,
    gateway_settings: GatewaySettings,
    keys: Keyspace,
    executor: FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
):
    """Its first attempt was accepted and answered, the answer was lost, and the sequence went on elsewhere. It hears
    its stored reply; and when so many steps came in that its request id may be forgotten, that nobody knows. However
    many attempts are lost, and whatever the clock of Redis says afterwards: what counts is when the first one was made.
    """
    monkeypatch.setattr("shared.store.scripts.RETRY_IDS", ids_remembered)
    monkeypatch.setattr("gateway.requests.exchange.dispatch.LATE_PATIENCE_S", 0.05)
    await behind_proxy.inference.submit(step(1, start=True, request_id="a"))
    proxy.cut_after = proxy.refuses_behind_submit
    again = behind_proxy.inference.submit(step(2, request_id="b"))
    while len(executor.received) < 2:
        await asyncio.sleep(0.005)
    async with without_ports(gateway_settings, keys) as elsewhere:
        assert total(await elsewhere.inference.submit(step(4, request_id="c"))) == 7
        # The last eight are remembered in any case (`submit.lua`).
        others = [f"c{number}" for number in range(8)] if ids_remembered == 1 else []
        for name in others:
            await elsewhere.inference.submit(step(0, request_id=name))
        async for stream in executor.commands.scan_iter(match=f"{keys.prefix}:*replies:*"):
            await executor.commands.xtrim(stream, maxlen=0)

        def later_ms(told: Sequence[bytes]) -> int:
            return clock_ms(told) + ahead_ms

        monkeypatch.setattr("gateway.requests.exchange.departures.clock_ms", later_ms)
        if cut_again:
            proxy.cut_before = is_submit
        proxy.refuses = False

        if ids_remembered > 1:
            assert 3 == total(await again)
        else:
            with pytest.raises(SequenceError, match="it is not known whether this step of sequence 1") as caught:
                await again
            assert (Reason.LATE, Code.INVALID_ARG, 3 + len(others)) == (
                caught.value.reason,
                caught.value.code,
                caught.value.last_step,
            )
        assert total(await elsewhere.inference.submit(step(8, request_id="d"))) == 15


async def test_a_step_that_never_came_is_not_too_late_for_the_steps_before_it(
    behind_proxy: GatewayParts,
    proxy: Proxy,
    gateway_settings: GatewaySettings,
    keys: Keyspace,
    executor: FakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
):
    """So many steps came through another gateway that ids of them are forgotten, but all before it was first sent."""
    monkeypatch.setattr("shared.store.scripts.RETRY_IDS", 1)
    async with without_ports(gateway_settings, keys) as elsewhere:
        for number in range(10):
            await elsewhere.inference.submit(step(1, start=number == 0, request_id=f"c{number}"))
        await asyncio.sleep(0.01)
        proxy.cut_before = is_submit

        assert 11 == total(await behind_proxy.inference.submit(step(1, request_id="b")))


async def test_a_script_that_redis_refuses_costs_the_requests_of_its_call_alone(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run_all, refusals = Scripts.run_all, [ResponseError("ERR no such thing")]

    async def refused_once(scripts: Scripts, calls: Sequence[Call[Any]], link: Link | None = None) -> list[Any]:
        if refusals and [call.script for call in calls] == ["submit"]:
            return [refusals.pop()]
        return await run_all(scripts, calls, link)

    monkeypatch.setattr(Scripts, "run_all", refused_once)

    answers = [parts.inference.submit(step(1, sequence, start=True)) for sequence in (1, 2)]
    for answer in answers:
        with pytest.raises(UnavailableError, match="Redis refused the request: ERR no such thing"):
            await answer

    assert ["redis refused a script"] == [one.message for one in caplog.records if one.message.startswith("redis")]
    assert 1 == total(await parts.inference.submit(step(1, start=True)))


async def test_a_stateless_request_that_finds_its_queue_full_is_refused(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    run_all = Scripts.run_all

    async def full(scripts: Scripts, calls: Sequence[Call[Any]], link: Link | None = None) -> list[Any]:
        if [call.script for call in calls] == ["work_enqueue"]:
            return [[False]]
        return await run_all(scripts, calls, link)

    monkeypatch.setattr(Scripts, "run_all", full)
    call = InferCall("echo", inputs=(Tensor("INPUT0", "FP32", (1, 1), bytes(4)),), request_id="r")

    with pytest.raises(UnavailableError, match=r"^\[request id: r\] Exceeds maximum queue size$"):
        await parts.inference.submit(call)


@pytest.mark.parametrize("refusal", [UnfitServerError("BUSY running a script"), ResponseError("NOPERM no permission")])
async def test_a_server_that_does_not_tell_the_time_is_asked_again(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch, refusal: Exception
):
    exchange, refusals = Link.exchange, [refusal]

    async def refused_once(link: Link, commands: Sequence[Sequence[Any]], **rest: Any) -> list[Any]:
        if list(commands) == [("TIME",)] and refusals:
            return [refusals.pop()]
        return await exchange(link, commands, **rest)

    monkeypatch.setattr(Link, "exchange", refused_once)

    assert 1 == total(await parts.inference.submit(step(1, start=True)))
    assert not refusals


async def test_no_request_waits_until_the_clock_is_read_again(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    assert 1 == total(await parts.inference.submit(step(1, start=True)))
    await settled(parts, 1)
    exchange, sent = Link.exchange, list[Any]()

    async def noted(link: Link, commands: Sequence[Sequence[Any]], **rest: Any) -> list[Any]:
        sent.append(commands[0][0])
        return await exchange(link, commands, **rest)

    monkeypatch.setattr(Link, "exchange", noted)
    monkeypatch.setattr("gateway.requests.exchange.departures.CLOCK_AFTER_S", 0)

    assert 2 == total(await parts.inference.submit(step(1)))
    async with asyncio.timeout(60):
        while "TIME" not in sent:
            await asyncio.sleep(0)

    assert sent.index("FCALL") < sent.index("TIME")


async def test_steps_sent_together_and_sent_again_together_run_once(
    behind_proxy: GatewayParts, proxy: Proxy, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    """Both were accepted and answered before the connections came back."""
    monkeypatch.setattr("gateway.requests.exchange.dispatch.LATE_PATIENCE_S", 60.0)
    await behind_proxy.inference.submit(step(1, start=True, request_id="a"))
    proxy.cut_after = proxy.refuses_behind_submit
    again = [behind_proxy.inference.submit(step(value, request_id=str(value))) for value in (2, 4)]
    while len(executor.received) < 3:
        await asyncio.sleep(0.005)
    proxy.refuses = False

    assert [3, 7] == [total(answer) for answer in await asyncio.gather(*again)]
    assert 3 == len(executor.received)
    assert total(await behind_proxy.inference.submit(step(8, request_id="d"))) == 15


@pytest.mark.parametrize(
    ("changed", "survives"),
    [
        ({}, True),
        ({"nx": 1}, False),
        ({"la": "1 g-other 2"}, False),
        ({"nx": 4, "la": "1 g-other 2"}, False),
        ({"nx": 4, "la": "1 {gateway} ff"}, True),
    ],
    ids=[
        *("its record is as new", "its record is older", "another gateway was faster"),
        *("another gateway was faster with several steps", "its gateway has accepted a later one"),
    ],
)
async def test_an_unnamed_step_is_told_lost_after_a_restart_only_if_its_record_does_not_know_it(
    parts: GatewayParts,
    executor: FakeExecutor,
    redis: Redis,
    keys: Keyspace,
    changed: dict[str, Any],
    *,
    survives: bool,
):
    """It is the newest step of its sequence; so its number is just what an intact record shows."""
    await parts.inference.submit(step(1, start=True))
    await executor.pause()
    open_step = parts.inference.submit(step(2))
    await settled(parts, 2)
    if changed:
        (waiting,) = parts.replies.unanswered
        mapping = {field: str(value).format(gateway=parts.replies.gateway) for field, value in changed.items()}
        await executor.commands.hset(keys.sequence(waiting.sequence).record, mapping=mapping)

    await parts.dispatch.ask_again(redis, keys.shards, [])

    assert open_step.done() != survives
    if survives:
        executor.paused.clear()
        assert 3 == total(await open_step)
    else:
        with pytest.raises(UnavailableError, match="Redis was restarted and may have lost data"):
            await open_step


async def test_a_step_that_is_being_taken_back_hears_that_redis_has_lost_it(
    parts: GatewayParts, executor: FakeExecutor, redis: Redis, keys: Keyspace
):
    """An ensemble whose client has left waits for what becomes of it, and later requests wait for the ensemble."""
    await executor.pause()
    first = parts.inference.submit(step(1, start=True))
    await settled(parts, 1)
    (waiting,) = parts.replies.unanswered
    waiting.withdrawn = True
    await executor.commands.unlink(keys.sequence(waiting.sequence).record)

    await parts.dispatch.ask_again(redis, keys.shards, [])

    with pytest.raises(UnavailableError, match="Redis was restarted and may have lost data"):
        await asyncio.wait_for(first, 30)


async def test_a_step_that_is_sent_again_after_a_restart_does_not_pass_for_an_unnamed_one_that_is_lost(
    parts: GatewayParts, executor: FakeExecutor, redis: Redis, keys: Keyspace
):
    """It gets the number that the lost step had."""
    await parts.inference.submit(step(1, start=True))
    await executor.pause()
    unnamed, named = parts.inference.submit(step(2)), parts.inference.submit(step(4, request_id="a"))
    await settled(parts, 3)
    own = keys.sequence(parts.replies.unanswered[0].sequence)
    await executor.commands.hset(own.record, mapping={"nx": 1, "la": "1 g-before 1"})
    await executor.commands.hdel(own.record, "rd")
    await executor.commands.pexpire(own.idle, 60_000)

    await parts.dispatch.ask_again(redis, keys.shards, [])

    assert b"2" == await executor.commands.hget(own.record, "nx")
    assert (True, False) == (unnamed.done(), named.done())
    with pytest.raises(UnavailableError, match="Redis was restarted and may have lost data"):
        await unnamed


async def test_a_server_that_cannot_serve_yet_after_a_restart_is_asked_again_and_fails_nobody(
    parts: GatewayParts, executor: FakeExecutor, redis: Redis, keys: Keyspace, monkeypatch: pytest.MonkeyPatch
):
    await executor.pause()
    open_step = parts.inference.submit(step(1, start=True, request_id="a"))
    await settled(parts, 1)

    async def unfit(_: Scripts, calls: Sequence[Call[Any]], link: Link | None = None) -> list[Any]:
        return [UnfitServerError("READONLY You can't write against a read only replica.") for _ in calls]

    with monkeypatch.context() as patched:
        patched.setattr(Scripts, "run_all", unfit)
        with pytest.raises(UnfitServerError):
            await parts.dispatch.ask_again(redis, keys.shards, [])

    await parts.dispatch.ask_again(redis, keys.shards, [])
    executor.paused.clear()
    assert 1 == total(await open_step)


async def test_stateless_request_whose_caller_leaves_while_its_fate_is_unknown_is_taken_back(
    behind_proxy: GatewayParts, proxy: Proxy, executor: FakeExecutor, keys: Keyspace
):
    call = InferCall("echo", inputs=(Tensor("INPUT0", "FP32", (1, 1), b"\0\0\0\0"),))
    # The server knows the script from now on: the call that is cut off is carried out.
    await behind_proxy.inference.submit(msgspec.structs.replace(call, request_id="first"))
    await executor.pause()
    queue = keys.work_queue("echo", "1")
    leaving: list[asyncio.Future[Any]] = []

    def leave_and_cut(chunk: bytes) -> bool:
        if b"FCALL" not in chunk or b"INPUT0" not in chunk:
            return False
        leaving[0].cancel()
        proxy.refuses = True
        return True

    proxy.cut_after = leave_and_cut
    leaving.append(behind_proxy.inference.submit(call))
    async with asyncio.timeout(60):
        while not await executor.commands.hlen(queue.meta):
            await asyncio.sleep(0.005)
        proxy.refuses = False
        while await executor.commands.hlen(queue.meta):
            await asyncio.sleep(0.005)

    executor.paused.clear()
    await behind_proxy.inference.submit(msgspec.structs.replace(call, request_id="next"))
    assert ["first", "next"] == [message.request_id for message in executor.received]


@pytest.mark.settings(max_bytes_in_flight=100)
async def test_beyond_the_bound_of_bytes_callers_are_refused_at_once(parts: GatewayParts, executor: FakeExecutor):
    """One that is larger than the bound is served when it is alone; what was refused is taken when there is room."""

    def echo(size: int) -> InferCall:
        return InferCall("echo", inputs=(Tensor("INPUT0", "FP32", (1, size // 4), bytes(size)),))

    await executor.pause()
    for sizes in ([104], [60, 40]):
        taken = [parts.inference.submit(echo(size)) for size in sizes]
        refused = parts.inference.submit(echo(4))
        assert isinstance(error := refused.exception(), UnavailableError)
        assert f"requests of {sum(sizes)} bytes in flight" in str(error)

        executor.paused.clear()
        await asyncio.gather(*taken)
        assert 0 == parts.inference.budget.taken
        await executor.pause()
    executor.paused.clear()
    await parts.inference.submit(echo(4))


async def test_replies_that_were_read_stay_in_redis_by_their_bytes_not_their_number(
    gateway_settings: GatewaySettings, keys: Keyspace, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gateway.requests.exchange.replies, "HEARTBEAT_S", 600.0)
    async with without_ports(gateway_settings, keys) as parts:
        name = f"{keys.base(keys.home_shard('echo'))}replies:*"
        (stream,) = [key async for key in executor.commands.scan_iter(match=name)]
        for _ in range(3):
            tensor = Tensor("INPUT0", "FP32", (1, 1 << 20), bytes(4 << 20))
            await parts.inference.submit(InferCall("echo", inputs=(tensor,)))
        async with asyncio.timeout(60):
            while await executor.commands.xlen(stream):
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("many_beats")
async def test_small_replies_that_were_read_leave_redis_with_the_next_heartbeat(
    parts: GatewayParts, executor: FakeExecutor
):
    """They are too few to be trimmed by a read: a gateway with little to do would keep them for ever."""
    for number in range(1, 9):
        await parts.inference.submit(step(1, number, start=True))
    async with asyncio.timeout(60):
        while sum([await executor.commands.xlen(stream) for stream in parts.replies._streams.values()]):
            await asyncio.sleep(0.01)


async def test_a_request_that_redis_does_not_take_harms_nobody(
    gateway_settings: GatewaySettings, private_server: EmbeddedRedis, keys: Keyspace
):
    """Redis would cut the connection, and nobody would know of the steps that were sent with it."""
    redis: Any = connect(private_server.url)
    await redis.config_set("proto-max-bulk-len", 1 << 20)
    executor = FakeExecutor(redis, keys)
    await executor.join()
    running = asyncio.create_task(executor.run())
    settings = dataclasses.replace(gateway_settings, redis_url=private_server.url)
    async with without_ports(settings, keys) as parts:
        tensor = Tensor("INPUT0", "FP32", (1, 1 << 18), bytes(1 << 20))
        beside = parts.inference.submit(step(1, 7, start=True))
        refused = parts.inference.submit(InferCall("echo", inputs=(tensor,)))
        fitting = Tensor("INPUT0", "FP32", (1, 200_000), bytes(800_000))
        fits = parts.inference.submit(InferCall("echo", inputs=(fitting,)))

        assert isinstance(error := refused.exception(), RequestError)
        assert f"has {1 << 20} bytes, and Redis" in str(error)
        await asyncio.gather(beside, fits)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await redis.aclose()


@pytest.mark.settings(max_requests_in_flight=3)
async def test_beyond_the_bound_callers_are_refused_at_once(parts: GatewayParts, executor: FakeExecutor):
    await executor.pause()
    taken = [parts.inference.submit(step(1, sequence, start=True)) for sequence in range(1, 4)]
    refused = parts.inference.submit(step(1, 9, start=True))

    assert isinstance(refused.exception(), UnavailableError)
    executor.paused.clear()
    assert [total(await answer) for answer in taken] == [1, 1, 1]


@pytest.mark.settings(max_requests_in_flight=3)
async def test_requests_for_an_unknown_model_wait_for_the_next_look_within_the_bound(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    looks: list[Callable[[], None]] = []

    def ask(_self: Catalog, then: Callable[[], None]) -> None:
        looks.append(then)

    monkeypatch.setattr(Catalog, "ask", ask)
    held = [parts.inference.submit(msgspec.structs.replace(step(1), model="unknown")) for _ in range(3)]
    beyond = parts.inference.submit(msgspec.structs.replace(step(1), model="unknown"))

    assert isinstance(beyond.exception(), UnavailableError)
    assert 3 == parts.inference.in_flight
    assert 3 == len(looks)
    for then in looks:
        then()
    assert {RequestError} == {type(error) for error in await asyncio.gather(*held, return_exceptions=True)}
    assert 0 == parts.inference.in_flight


@pytest.mark.settings(request_timeout_ms=1000)  # so long that the request has been sent, also on a busy machine
async def test_unanswered_request_fails_after_the_gateways_timeout(parts: GatewayParts, executor: FakeExecutor):
    await executor.pause()
    with pytest.raises(UnavailableError, match="no answer came within 1000 ms"):
        await parts.inference.submit(step(1, start=True))


@pytest.mark.settings(sequence_inflight_max=2)
async def test_too_many_open_steps_of_a_sequence_are_refused_as_busy(parts: GatewayParts, executor: FakeExecutor):
    await executor.pause()
    answers = [parts.inference.submit(step(1, start=index == 0)) for index in range(3)]
    with pytest.raises(SequenceError) as caught:
        await answers[2]
    executor.paused.clear()

    assert (caught.value.reason, caught.value.code) == (Reason.BUSY, Code.RESOURCE_EXHAUSTED)
    assert [total(await answer) for answer in answers[:2]] == [1, 2]


@pytest.mark.settings(backlog_max=4)
async def test_full_backlog_refuses_a_start(parts: GatewayParts, executor: FakeExecutor):
    await executor.pause()
    answers = [parts.inference.submit(step(1, sequence, start=True)) for sequence in range(1, 12)]
    while parts.inference.in_flight > 4:
        await asyncio.sleep(0.005)
    refused = [answer.exception() for answer in answers if answer.done()]
    accepted = [answer for answer in answers if not answer.done()]
    executor.paused.clear()
    taken = [total(answer) for answer in await asyncio.gather(*accepted)]

    assert len(refused) == 7
    assert {type(error) for error in refused} == {SequenceError}
    assert {error.reason for error in refused if isinstance(error, SequenceError)} == {Reason.BACKLOG_FULL}
    assert taken == [1, 1, 1, 1]


async def test_request_for_a_model_that_was_loaded_a_moment_ago_is_served(parts: GatewayParts, executor: FakeExecutor):
    """The gateway's picture is older than the model: it looks again before it refuses."""
    record = (await executor.membership.models())["running_sum"]
    await executor.commands.hdel(executor.keys.models, "running_sum")
    await parts.catalog.refresh()
    await asyncio.sleep(0.15)
    await executor.membership.publish(record)

    first, second = (parts.inference.submit(step(1, start=start)) for start in (True, False))

    assert [total(await first), total(await second)] == [1, 2]


async def test_read_replies_are_trimmed(parts: GatewayParts, executor: FakeExecutor):
    for _ in range(3):
        await asyncio.gather(*(parts.inference.submit(step(1, n, start=True)) for n in range(1, 101)))
    lengths = [
        await executor.commands.xlen(key)
        async for key in executor.commands.scan_iter(match=f"{executor.keys.prefix}:*replies:*")
    ]

    assert max(lengths) < 200


async def test_http_client_that_leaves_while_it_waits_frees_his_place(
    gateway: RunningGateway, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.rest.client_watch.WATCH_AFTER_S", 0.01)
    await executor.pause()
    body = (
        b'{"inputs":[{"name":"INPUT","datatype":"INT32","shape":[1,1],"data":[1]}],'
        b'"parameters":{"sequence_id":5,"sequence_start":true}}'
    )
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port)
    writer.write(
        b"POST /v2/models/running_sum/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )

    async with aiohttp.ClientSession(f"http://{gateway.url}") as session:

        async def in_flight_becomes(count: int) -> None:
            page = ""
            while f"seqmesh_gateway_requests_in_flight {count}\n" not in page:
                await asyncio.sleep(0.01)
                async with session.get("/metrics") as response:
                    page = await response.text()

        async with asyncio.timeout(60):
            await in_flight_becomes(1)
            writer.close()
            await in_flight_becomes(0)
    executor.paused.clear()
