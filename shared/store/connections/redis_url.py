"""Where the mesh's Redis is: the one place that reads, checks and shows the setting `redis_url`.

    redis://[user:password@]host[:6379][/db]             rediss:// is the same over TLS
    unix:///path/to/socket[?db=N]                        user and password as options, or before the path
    redis+sentinel://[user:password@]host[:26379],host.../service[/db]     Sentinels tell which server is the primary;
                                                         rediss+sentinel:// reaches that server over TLS
    redis+cluster://[user:password@]host[:6379],host...  a Redis Cluster, of which some nodes are named; the nodes tell
                                                         who holds which keys. rediss+cluster:// reaches all over TLS

Options behind a `?`: `db`, `username`, `password`, and of TLS `ssl_ca_certs`, `ssl_ca_path`, `ssl_certfile`,
`ssl_keyfile`, `ssl_password`, `ssl_cert_reqs`, `ssl_check_hostname`, `ssl_ciphers`. What is for the Sentinels alone
begins with `sentinel_`: `sentinel_username`, `sentinel_password`, `sentinel_tls=yes`, `sentinel_ssl_ca_certs`, ... They
take nothing over from the server's.

A URL that is wrong may hold a password anywhere. So no message repeats a part of one, and Python's own parsers, whose
errors do, are kept away from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

from shared.process.addresses import authority

HIDDEN = "***"
REDIS_PORT = 6379
SENTINEL_PORT = 26379
SENTINEL_PREFIX = "sentinel_"
WHOLE = re.compile(
    r"(?P<scheme>[a-z+]+)://(?:(?P<login>[^/?#]*)@)?(?P<hosts>[^/?#@]*)(?P<path>/[^?#@]*)?(?:\?(?P<query>[^#]*))?"
)
HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[^\s\[\]:]+))(?::(?P<port>[0-9]{1,5}))?")
LOGIN = re.compile(r"^([a-z+]+://[^:/?#]*):[^/?#]*@")
SECRET_OPTION = re.compile(r"([?&][^=&]*password=)[^&]*")
PERCENT = "special characters of a password are written in percent form: %23 for #, %2F for /, %3F for ?, %40 for @"

Way = Literal["tcp", "tls", "unix"]
SCHEMES: Mapping[str, Way] = {
    "redis": "tcp",
    "rediss": "tls",
    "unix": "unix",
    "redis+sentinel": "tcp",
    "rediss+sentinel": "tls",
    "redis+cluster": "tcp",
    "rediss+cluster": "tls",
}
WORDS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


class RedisUrlError(ValueError):
    """The URL cannot be used; the message says what to change, and holds no part of the URL that may be secret."""


@dataclass(frozen=True, slots=True)
class RedisEndpoint:
    """How to speak to a server. options: arguments of redis-py's connections, as far as they come from the URL"""

    way: Way
    options: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """The address that a URL names.

    server     how to speak to the server; behind Sentinels without host and port, which the Sentinels tell
    sentinels  one endpoint for each Sentinel; none if the server has a fixed address
    service    the name under which the Sentinels know the server
    nodes      host and port of nodes of a Cluster; none if it is no Cluster
    """

    server: RedisEndpoint
    sentinels: tuple[RedisEndpoint, ...] = ()
    service: str = ""
    nodes: tuple[tuple[str, int], ...] = ()

    @property
    def named(self) -> tuple[str, int] | None:
        """Host and port of the first machine that the URL names; None if it names a socket."""
        if self.nodes:
            return self.nodes[0]
        options = (*self.sentinels, self.server)[0].options
        return (options["host"], options["port"]) if "host" in options else None


def parse_redis_url(url: str) -> RedisAddress:
    """Reads a URL. Raises `RedisUrlError`."""
    if not url.isprintable() or " " in url:
        raise RedisUrlError(f"the URL holds blanks or control characters; {PERCENT}")
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise RedisUrlError(f"the URL must begin with one of {', '.join(name + '://' for name in SCHEMES)}")
    parts = WHOLE.fullmatch(url)
    if parts is None:
        raise RedisUrlError(f"the URL has no form that is known; {PERCENT}")
    given = _options(parts["query"] or "")
    apart = {name: value for name, value in given.items() if name.startswith(SENTINEL_PREFIX)}
    own = {name: value for name, value in given.items() if name not in apart}
    if parts["login"] is not None:
        user, colon, password = parts["login"].partition(":")
        if not colon and "password" not in own:
            raise RedisUrlError("a user without a password: write user:password@ (user:@ for one that needs none)")
        own = {"username": unquote(user), "password": unquote(password), **own}
    if "sentinel" in scheme:
        return _behind_sentinels(SCHEMES[scheme], parts["hosts"], parts["path"] or "", own, apart)
    if apart:
        raise RedisUrlError(f"options that begin with {SENTINEL_PREFIX} are for redis+sentinel:// URLs")
    if "cluster" in scheme:
        return _of_cluster(SCHEMES[scheme], parts["hosts"], parts["path"] or "", own)
    if scheme == "unix":
        if parts["hosts"] or not parts["path"]:
            raise RedisUrlError("a socket's URL is unix:///path/to/socket, with three slashes")
        return RedisAddress(_endpoint("unix", own, {"path": unquote(parts["path"])}))
    hosts = _hosts(parts["hosts"], REDIS_PORT)
    if len(hosts) > 1:
        raise RedisUrlError(
            "several hosts, with commas between them, are Sentinels' or nodes of a Cluster: write "
            "redis+sentinel://host,host/service or redis+cluster://host,host (rediss+... for servers with TLS)"
        )
    return RedisAddress(_endpoint(SCHEMES[scheme], {**own, **_database(parts["path"] or "")}, hosts[0]))


def url_without_password(url: str) -> str:
    """The URL with its passwords as stars. Of a URL that cannot be used only the scheme is shown."""
    try:
        parse_redis_url(url)
    except RedisUrlError:
        scheme = url.partition("://")[0]
        return f"{scheme}://{HIDDEN}" if scheme in SCHEMES else HIDDEN if url else ""
    return SECRET_OPTION.sub(rf"\1{HIDDEN}", LOGIN.sub(rf"\1:{HIDDEN}@", url))


def url_of_node(url: str, host: str, port: int) -> str:
    """The URL of one node of a Cluster as a server. url: the Cluster's"""
    parts = WHOLE.fullmatch(url)
    assert parts is not None, "a URL that was read"
    login = "" if parts["login"] is None else f"{parts['login']}@"
    options = f"?{parts['query']}" if parts["query"] else ""
    return f"{parts['scheme'].removesuffix('+cluster')}://{login}{authority(host, port)}{options}"


def has_password(url: str) -> bool:
    return HIDDEN in url_without_password(url)


def _behind_sentinels(
    way: Way, hosts: str, path: str, own: Mapping[str, str], apart: Mapping[str, str]
) -> RedisAddress:
    service, _, database = path.removeprefix("/").partition("/")
    if not service:
        raise RedisUrlError(
            "the service is missing: redis+sentinel://host,host/service, as in `sentinel monitor service`"
        )
    options = {name.removeprefix(SENTINEL_PREFIX): value for name, value in apart.items()}
    over = "tls" if _flag(f"{SENTINEL_PREFIX}tls", options.pop("tls", "no")) else "tcp"
    sentinels = [_endpoint(over, options, host, SENTINEL_PREFIX) for host in _hosts(hosts, SENTINEL_PORT)]
    return RedisAddress(_endpoint(way, {**own, **_database(database)}, {}), tuple(sentinels), unquote(service))


def _of_cluster(way: Way, hosts: str, path: str, own: Mapping[str, str]) -> RedisAddress:
    if path.strip("/0") or own.get("db", "0").strip("0"):
        raise RedisUrlError("a Cluster has database 0 alone: leave the number of a database out")
    nodes = tuple((host["host"], host["port"]) for host in _hosts(hosts, REDIS_PORT))
    return RedisAddress(_endpoint(way, {name: value for name, value in own.items() if name != "db"}, {}), nodes=nodes)


def _hosts(text: str, port: int) -> list[dict[str, Any]]:
    """Host and port of each host; `port` if none is given."""
    hosts: list[dict[str, Any]] = []
    for one in text.split(","):
        match = HOST.fullmatch(one)
        if match is None:
            raise RedisUrlError(f"where the host is expected there is no host[:port]; {PERCENT}")
        number = int(match["port"] or port)
        if not 0 < number < 1 << 16:
            raise RedisUrlError("a port is a number from 1 to 65535")
        hosts.append({"host": match["six"] or unquote(match["name"]), "port": number})
    return hosts


def _database(path: str) -> dict[str, str]:
    number = path.strip("/")
    return {"db": number} if number else {}


def _options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name.removeprefix(SENTINEL_PREFIX) not in OPTIONS:
            known = ", ".join(sorted(OPTIONS))
            raise RedisUrlError(f"an option behind the ? is none of {known}, nor {SENTINEL_PREFIX} and one of them")
        if name in options:
            raise RedisUrlError(f"the option {name} is given twice")
        options[name] = unquote(value)
    return options


def _endpoint(way: Way, given: Mapping[str, str], where: Mapping[str, Any], prefix: str = "") -> RedisEndpoint:
    """The options with their values read. prefix: of the options' names, for messages"""
    for name in given:
        if name == "tls" or (name.startswith("ssl_") and way != "tls"):
            remedy = "sentinel_tls=yes" if prefix else "rediss:// or rediss+sentinel://"
            raise RedisUrlError(f"the option {prefix}{name} is for connections with TLS: {remedy}")
    return RedisEndpoint(way, {**where, **{name: OPTIONS[name](prefix + name, value) for name, value in given.items()}})


def _text(name: str, value: str) -> str:
    if not value and not name.endswith(("username", "password")):
        raise RedisUrlError(f"the option {name} is empty")
    return value


def _number(_: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= 5):
        raise RedisUrlError(f"what stands behind the host is no number of a database; {PERCENT}")
    return int(value)


def _flag(name: str, value: str) -> bool:
    if value.lower() not in WORDS:
        raise RedisUrlError(f"the option {name} is yes or no")
    return WORDS[value.lower()]


def _requirement(name: str, value: str) -> str:
    if value not in ("none", "optional", "required"):
        raise RedisUrlError(f"the option {name} is none, optional or required")
    return value


OPTIONS: Mapping[str, Callable[[str, str], Any]] = {
    "db": _number,
    "username": _text,
    "password": _text,
    "tls": _flag,
    "ssl_ca_certs": _text,
    "ssl_ca_path": _text,
    "ssl_certfile": _text,
    "ssl_keyfile": _text,
    "ssl_password": _text,
    "ssl_cert_reqs": _requirement,
    "ssl_check_hostname": _flag,
    "ssl_ciphers": _text,
}
"""Option -> function that reads its value."""
