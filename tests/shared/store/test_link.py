"""What a link makes of replies."""

from __future__ import annotations

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.store.link import Link, streams_read
from shared.store.redis_client import connect


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
