"""Refuses requests that a foreign web page makes through a browser: to a gateway, which serves no web pages itself, and
to the console, whose own page is not foreign.

A browser sends the requests that a page asks it to send, also from inside a private network that the page's author
cannot reach; a POST of plain text it sends without asking the server first. Two rules stop that. Clients that are not
browsers never meet them:

    foreign    a request that may change something is refused when its `Origin` is not this server, or when the browser
               says that it comes from another site (`Sec-Fetch-Site`)
    rebinding  an attacker can let a name of their own lead to 127.0.0.1: to the browser, their page then has this
               server's origin. So a server on a loopback address answers only under names that an attacker cannot have:
               addresses, names without a dot, and this machine's name. A port that other machines reach has names that
               the server cannot know, so the rule does not apply there

An operator allows the origins of pages that a proxy serves in front of the server, by a setting.

Source: the Fetch standard, `Origin` and `Sec-Fetch-Site`; the same rules in Jupyter, Ollama, webpack's server.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

SAFE_METHODS = frozenset(("GET", "HEAD"))
"""Methods that change nothing. The browser does not show their answers to a foreign page."""
BROWSERS_HEADERS = (b"host", b"origin", b"sec-fetch-site")
"""Headers that a browser sends once, and that no page can set."""
OWN_PAGES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` for a page of this server, and for a request that no page made (a typed address)."""
DEFAULT_PORTS = {"http": 80, "https": 443}
NAMES_KEPT = 256
"""Size of the caches: clients call a server by few names."""

Place = tuple[str, int | None]
"""Host and port; None for no port."""


class Origins:
    """Judges requests by their browser headers.

    allowed      origins of the setting
    is_loopback  whether only this machine reaches the port
    flag         of that setting
    """

    def __init__(
        self, allowed: Iterable[str] = (), *, is_loopback: bool = False, flag: str = "--http-allowed-origin"
    ) -> None:
        self._flag = flag
        self._allowed = frozenset(map(parse_origin, allowed))
        names = {socket.gethostname().lower(), *(host for _, (host, _) in self._allowed)}
        self._names = frozenset(names) if is_loopback else None

    def refusal(self, scope: Mapping[str, Any]) -> str:
        """Why a request is refused; "" if it is not. scope: of ASGI"""
        given: dict[bytes, str] = {
            name: value.decode("latin-1") for name, value in scope["headers"] if name in BROWSERS_HEADERS
        }
        host = given.get(b"host", "")
        if self._names is not None and host and not is_local(name := place_of(host)[0], self._names):
            return (
                f"this server listens on a loopback address and does not go by the name '{name}': use localhost or an "
                f"address, or allow the name with {self._flag}"
            )
        if scope["method"] in SAFE_METHODS:
            return ""
        origin = given.get(b"origin")
        if origin is not None and not self._is_ours(origin, host):
            return (
                f"web pages of other origins may not use this server, got origin '{origin}': allow it with {self._flag}"
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
    """Scheme, host and port of an origin such as `https://app.example.com`. Raises ValueError for another text."""
    parts = urlsplit(text.lower())
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.path or parts.query or "@" in parts.netloc:
        raise ValueError(
            f"'{text}' is no origin: write http://<host> or https://<host>, with :<port> unless it is the default"
        )
    return parts.scheme, (parts.hostname.rstrip("."), parts.port or DEFAULT_PORTS[parts.scheme])


@lru_cache(NAMES_KEPT)
def place_of(host: str) -> Place:
    """Host and port of a `Host` header."""
    try:
        parts = urlsplit(f"//{host.lower()}")
        return (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return host, None


def is_local(name: str, names: frozenset[str]) -> bool:
    """Whether an attacker cannot own this name. A name without a dot cannot be registered."""
    return "." not in name or name.endswith(".localhost") or name in names or is_address(name)


@lru_cache(NAMES_KEPT)
def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a listening socket's address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
