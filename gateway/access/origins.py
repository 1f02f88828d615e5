"""Whose web pages may use the HTTP ports. A gateway serves no pages: but for a proxy in front of it, nobody's.

A browser sends what any page asks it to send, from inside a network where nobody else could; for a POST of plain text
it asks nobody first. So two rules, neither of which a client that is no browser meets:

    foreign    a request that may change something is refused when its `Origin` is not this server, or when the browser
               says that it comes from elsewhere (`Sec-Fetch-Site`)
    rebinding  a name that an attacker lets lead to 127.0.0.1 makes the attacker's page this server's own. A server that
               listens on a loopback address answers under names alone that no stranger can have: addresses, names
               without a dot, this machine's. A port that others can reach cannot know its names

An operator names the origins of pages that a proxy serves under its own name (`--http-allowed-origin`).

Source: the Fetch standard, `Origin` and `Sec-Fetch-Site`; the same rules in Jupyter, Ollama, webpack's server.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import Scope

SAFE_METHODS = frozenset(("GET", "HEAD"))
"""They change nothing, and a foreign page does not get to see their answers."""
BROWSERS_HEADERS = (b"host", b"origin", b"sec-fetch-site")
"""A browser sends each of them once, and lets no page say what is in them."""
OWN_PAGES = ("same-origin", "none")
"""What a browser says of where a request comes from: a page of this server, or nobody's (typed in)."""
DEFAULT_PORTS = {"http": 80, "https": 443}
NAMES_KEPT = 256
"""Clients call a server by few names, again and again."""

Place = tuple[str, int | None]
"""Host and port; None where nobody says one."""


class Origins:
    """allowed: origins as of the setting; is_loopback: whether nobody but this machine reaches the port."""

    def __init__(self, allowed: Iterable[str] = (), *, is_loopback: bool = False) -> None:
        self._allowed = frozenset(map(parse_origin, allowed))
        names = {socket.gethostname().lower(), *(host for _, (host, _) in self._allowed)}
        self._names = frozenset(names) if is_loopback else None

    def refusal(self, scope: Scope) -> str:
        """Why a request is not answered; "" for one that is."""
        given: dict[bytes, str] = {
            name: value.decode("latin-1") for name, value in scope["headers"] if name in BROWSERS_HEADERS
        }
        host = given.get(b"host", "")
        if self._names is not None and host and not is_local(name := place_of(host)[0], self._names):
            return (
                f"this server listens on a loopback address and does not go by the name '{name}': use localhost or an "
                "address, or allow the name with --http-allowed-origin"
            )
        if scope["method"] in SAFE_METHODS:
            return ""
        origin = given.get(b"origin")
        if origin is not None and not self._is_ours(origin, host):
            return (
                f"web pages of other origins may not use this server, got origin '{origin}': allow it with "
                "--http-allowed-origin"
            )
        if origin is None and given.get(b"sec-fetch-site", OWN_PAGES[0]) not in OWN_PAGES:
            return "web pages of other sites may not use this server"
        return ""

    def _is_ours(self, origin: str, host: str) -> bool:
        try:
            scheme, place = parse_origin(origin)
        except ValueError:
            return False
        called, port = place_of(host)
        return (scheme, place) in self._allowed or place == (called, port or DEFAULT_PORTS[scheme])


def parse_origin(text: str) -> tuple[str, Place]:
    """Scheme, host and port of an origin, `https://app.example.com`. Raises ValueError for what is none."""
    parts = urlsplit(text.lower())
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.path or parts.query or "@" in parts.netloc:
        raise ValueError(
            f"'{text}' is no origin: write http://<host> or https://<host>, with :<port> unless it is the default"
        )
    return parts.scheme, (parts.hostname.rstrip("."), parts.port or DEFAULT_PORTS[parts.scheme])


@lru_cache(NAMES_KEPT)
def place_of(host: str) -> Place:
    """Of a `Host` header."""
    try:
        parts = urlsplit(f"//{host.lower()}")
        return (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return host, None


def is_local(name: str, names: frozenset[str]) -> bool:
    """Whether no stranger can decide where a name leads: nobody gets a name without a dot from a registry."""
    return "." not in name or name.endswith(".localhost") or name in names or is_address(name)


@lru_cache(NAMES_KEPT)
def is_address(name: str) -> bool:
    """Whether it is no name, but an address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether a listening socket's address is reached by its own machine alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
