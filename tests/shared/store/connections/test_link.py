"""What a link makes of replies."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.store.connections.cluster_redis import ClusterRedis
from shared.store.connections.homes import MESH_TAG
from shared.store.connections.link import Link, new_link, streams_read
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import CONNECTION_LOST


def test_a_stream_that_is_named_without_entries_has_no_news() -> None:
    entry = [b"1-0", [b"k", b"v"]]

    assert [(b"b", [entry])] == streams_read([[b"a", []], [b"b", [entry]]])
    assert [] == streams_read([[b"a", []]])
    assert [] == streams_read(None)


async def test_a_server_that_does_not_answer_the_end_of_tls_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py waits for that answer, and raises when it does not come: in whatever closes the link, such as a stop."""
    async with connect("redis://127.0.0.1:1") as redis:
        link = Link(redis)

        async def unanswered(*_: object, **__: object) -> None:
            raise RedisTimeoutError("Timed out closing connection after 5")

        monkeypatch.setattr(link._connection, "disconnect", unanswered)
        await link.close()


async def test_a_home_of_a_cluster_that_is_away_fails_the_commands_for_it_alone(
    redis_url: str, key_prefix: str
) -> None:
    def open_home(tag: str) -> Any:
        return connect("redis://127.0.0.1:1" if tag == MESH_TAG else redis_url, retries=0)

    async with ClusterRedis(open_home) as redis:
        link = new_link(cast("Any", redis))
        await link.connect()
        here, away = ("GET", f"{key_prefix}:{{0}}:here"), ("GET", f"{key_prefix}:{{{MESH_TAG}}}:away")

        assert [None] == await link.ask([here])
        assert [] == await link.exchange([])
        with pytest.raises(CONNECTION_LOST):
            await link.ask([here, away])
        found, lost = await link.exchange([here, away])
        assert (None, True) == (found, isinstance(lost, CONNECTION_LOST))
        with pytest.raises(CONNECTION_LOST):
            await link.exchange([away])
        assert [None] == await link.ask([here])

        await link.close()
