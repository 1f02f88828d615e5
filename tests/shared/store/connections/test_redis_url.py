"""The one place that reads Redis' URL: what each form means, what is refused, and that nothing secret is ever said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.store.connections.redis_url import (
    RedisUrlError,
    has_password,
    parse_redis_url,
    url_of_node,
    url_without_password,
)


@pytest.mark.parametrize(
    ("url", "way", "options"),
    [
        ("redis://example", "tcp", {"host": "example", "port": 6379}),
        ("redis://example:1/2", "tcp", {"host": "example", "port": 1, "db": 2}),
        ("redis://[::1]:1/?db=3", "tcp", {"host": "::1", "port": 1, "db": 3}),
        (
            "redis://me:p%40s%2Fs@example",
            "tcp",
            {"host": "example", "port": 6379, "username": "me", "password": "p@s/s"},
        ),
        ("redis://:p@ss@example", "tcp", {"host": "example", "port": 6379, "username": "", "password": "p@ss"}),
        ("redis://me:@example", "tcp", {"host": "example", "port": 6379, "username": "me", "password": ""}),
        ("unix:///a%20b/c?db=1&password=s", "unix", {"path": "/a b/c", "db": 1, "password": "s"}),
        ("unix://me@/a?password=s", "unix", {"path": "/a", "username": "me", "password": "s"}),
        (
            "rediss://example?ssl_ca_certs=/ca.pem&ssl_check_hostname=no&ssl_cert_reqs=optional",
            "tls",
            {
                "host": "example",
                "port": 6379,
                "ssl_ca_certs": "/ca.pem",
                "ssl_check_hostname": False,
                "ssl_cert_reqs": "optional",
            },
        ),
    ],
)
def test_a_server_with_an_address(url: str, way: str, options: dict[str, Any]) -> None:
    address = parse_redis_url(url)

    assert ((), "") == (address.sentinels, address.service)
    assert (way, options) == (address.server.way, address.server.options)


def test_sentinels_have_an_address_each_and_what_is_theirs_is_apart_from_the_servers() -> None:
    address = parse_redis_url(
        "rediss+sentinel://me:secret@a,b:1,[::1]:2/mesh/3?ssl_ca_certs=/ca&sentinel_username=asker&sentinel_password=s2"
    )

    assert ("mesh", "tls") == (address.service, address.server.way)
    assert {"username": "me", "password": "secret", "db": 3, "ssl_ca_certs": "/ca"} == address.server.options
    assert [("a", 26379), ("b", 1), ("::1", 2)] == [(s.options["host"], s.options["port"]) for s in address.sentinels]
    for sentinel in address.sentinels:
        assert "tcp" == sentinel.way
        assert ("asker", "s2") == (sentinel.options["username"], sentinel.options["password"])
        assert "ssl_ca_certs" not in sentinel.options
    (apart,) = parse_redis_url("redis+sentinel://a/mesh?sentinel_tls=yes&sentinel_ssl_ca_certs=/ca").sentinels
    assert ("tls", "/ca") == (apart.way, apart.options["ssl_ca_certs"])


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://:hunter2@example", "must begin with one of redis://, rediss://, unix://, redis"),
        ("hunter2", "must begin with"),
        ("redis+proxy://:hunter2@a", "must begin with"),
        ("redis://a:1,b:2/0", r"are Sentinels' or nodes of a Cluster: write redis\+sentinel://"),
        ("redis://:hunter2@a,b", r"are Sentinels' or nodes of a Cluster: write redis\+sentinel://"),
        ("redis+cluster://:hunter2@a,b/1", "database 0 alone"),
        ("redis+cluster://:hunter2@a?db=2", "database 0 alone"),
        ("redis+cluster://:hunter2@", "no host"),
        ("redis+cluster://:hunter2@a?sentinel_tls=yes", "are for redis.sentinel"),
        ("redis://:hunter2#3@example", "%23 for #"),
        ("redis://:hunter2/3@example", "%2F for /"),
        ("redis://:77/hunter2@example", "%2F for /"),
        ("redis://:77?hunter2@example", "none of db, password"),
        ("redis://a:77?hunter2@example", "none of db, password"),
        ("redis://:hunter2 @example", "blanks"),
        ("redis://:hunter2\n@example", "blanks"),
        ("redis://:hunter[2@exa]mple", "no host"),
        ("redis://:hunter2℀@example:\uff11", "no host"),
        ("redis://hunter2@example", "a user without a password"),
        ("redis://:hunter2@example:0", "1 to 65535"),
        ("redis://:hunter2@example:65536", "1 to 65535"),
        ("redis://:hunter2@example/zero", "no number of a database"),
        ("redis://:hunter2@", "no host"),
        ("redis://", "no host"),
        ("unix://example/path", "three slashes"),
        ("unix://", "three slashes"),
        ("redis://:hunter2@example?socket_timeout=3", "none of db, password"),
        ("redis://:hunter2@example?protocol=3", "none of db, password"),
        ("redis://example?pass%77ord=hunter2", "none of db, password"),
        ("redis://example?password=hunter2&password=hunter2", "given twice"),
        ("redis://:hunter2@example?ssl_ca_certs=x", "with TLS: rediss://"),
        ("rediss://:hunter2@example?ssl_ca_certs=", "is empty"),
        ("rediss://:hunter2@example?ssl_cert_reqs=maybe", "none, optional or required"),
        ("rediss://:hunter2@example?ssl_check_hostname=maybe", "yes or no"),
        ("redis://:hunter2@example?sentinel_password=hunter2", r"are for redis\+sentinel://"),
        ("redis+sentinel://:hunter2@a,b", "the service is missing"),
        ("redis+sentinel://:hunter2@a,/mesh", "no host"),
        ("redis+sentinel://:hunter2@a/mesh?sentinel_ssl_ca_certs=x", "sentinel_tls=yes"),
        ("redis+sentinel://:hunter2@a/mesh?tls=yes", "with TLS"),
    ],
)
def test_a_wrong_url_is_refused_with_the_remedy_and_without_a_word_of_what_may_be_a_password(
    url: str, told: str
) -> None:
    with pytest.raises(RedisUrlError, match=told) as refused:
        parse_redis_url(url)

    assert "hunter" not in str(refused.value)
    assert "hunter" not in url_without_password(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("unix:///a%20b/redis.sock", "unix:///a%20b/redis.sock"),
        ("redis://user:hunter2@example:6379/0", "redis://user:***@example:6379/0"),
        ("redis://:hun@ter2@example", "redis://:***@example"),
        ("unix://me@/a?db=1&password=hunter2", "unix://me@/a?db=1&password=***"),
        ("rediss://a?ssl_password=hunter2&db=1", "rediss://a?ssl_password=***&db=1"),
        (
            "redis+sentinel://u:hunter2@a,b:2/mesh/0?sentinel_password=hunter3&sentinel_tls=yes",
            "redis+sentinel://u:***@a,b:2/mesh/0?sentinel_password=***&sentinel_tls=yes",
        ),
        ("", ""),
        ("redis://hunter2", "redis://hunter2"),
        ("redis://hunter2/0/0", "redis://***"),
        ("hunter2://hunter2", "***"),
    ],
)
def test_a_url_is_shown_without_its_passwords(url: str, shown: str) -> None:
    assert shown == url_without_password(url)
    assert (shown != url) == has_password(url)


PLACES = st.sampled_from(
    [
        "redis://:{}@h:1/0",
        "rediss://u:{}@h?db=1",
        "unix://:{}@/path",
        "redis+sentinel://:{}@h,h/mesh",
        "unix:///p?password={}",
        "redis+sentinel://h/mesh?sentinel_password={}&db=1",
    ]
)
BITS = st.text("ab:/?#[]@%&=,. \n\u2100", max_size=8)


@given(PLACES, BITS, BITS)
def test_no_message_holds_a_password_whatever_stands_around_it(place: str, before: str, behind: str) -> None:
    """Where it is written as it should be, or so badly that the URL is refused."""
    url = place.format(f"{before}hunter2{behind}")

    said = [url_without_password(url)]
    try:
        parse_redis_url(url)
    except RedisUrlError as refused:
        said.append(str(refused))

    assert not any("hunter2" in text for text in said)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis://a:7/2", ("a", 7)),
        ("redis+sentinel://s1,s2:3/mesh", ("s1", 26379)),
        ("rediss+cluster://n1,n2:3", ("n1", 6379)),
        ("unix:///run/redis", None),
    ],
)
def test_the_first_machine_that_is_named(url: str, named: tuple[str, int] | None) -> None:
    assert named == parse_redis_url(url).named


def test_nodes_of_a_cluster_are_spoken_to_alike() -> None:
    address = parse_redis_url("rediss+cluster://u:p%40@n1,[::1]:7000?ssl_ca_certs=/ca")

    assert (("n1", 6379), ("::1", 7000)) == address.nodes
    assert ("tls", {"username": "u", "password": "p@", "ssl_ca_certs": "/ca"}) == (
        address.server.way,
        address.server.options,
    )


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+cluster://a:1,b:2", "redis://[::1]:7"),
        ("rediss+cluster://me:p%40ss@a,b?ssl_cert_reqs=none", "rediss://me:p%40ss@[::1]:7?ssl_cert_reqs=none"),
    ],
)
def test_a_node_of_a_cluster_is_reached_as_the_cluster_is(url: str, expected: str) -> None:
    node = url_of_node(url, "::1", 7)

    assert expected == node
    whole, alone = parse_redis_url(url).server, parse_redis_url(node).server
    assert (whole.way, {**whole.options, "host": "::1", "port": 7}) == (alone.way, alone.options)
