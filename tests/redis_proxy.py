"""The proxy of `seqmesh chaos` in front of a Redis, with further faults that only tests ask for.

hang_up     the client gets RST; bytes that it had sent still reach the target, delayed by `hold` if that is set
refuse      links are cut, and new ones as soon as their name is known, until `admit`
trap        the next request that contains certain bytes is the link's last: it is lost, lost in part, or carried
            out while its reply is lost
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from deploy.chaos.proxy import ProxiedLink, Proxy, Way


def through(proxy: str, url: str) -> str:
    """The URL by which a server is reached through a proxy. proxy: the proxy's host:port."""
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{credentials}{at}{proxy}"))


class Loss(Enum):
    """What a trap does to the request.

    UNSENT    it is not passed on: the target has seen nothing of it
    PARTIAL   half of it is passed on, then the link is cut
    UNKNOWN   it is passed on, and the link is cut when the first byte of the reply comes: it was carried out, and the
              client does not know
    """

    UNSENT = auto()
    PARTIAL = auto()
    UNKNOWN = auto()


@dataclass(eq=False, slots=True)
class Trap:
    """Waits for a request. sprung: how often it has cut a link so far; left: how often it will do so still."""

    matching: bytes
    loss: Loss
    of: str
    left: int
    sprung: int = 0


class RedisProxy(Proxy):
    """A proxy before the server of a URL (`redis://`). A context manager: listens on entry, is gone on exit."""

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        super().__init__(str(parts.hostname), parts.port or 0)
        self._server = server
        # All of the following is touched by the loop's thread alone.
        self._refused: set[str] = set()
        self._traps: list[Trap] = []
        self._doomed: set[ProxiedLink] = set()
        self._waiting = 0

    def __enter__(self) -> Self:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The server's, by way of this proxy."""
        return through(self.address, self._server)

    @property
    def names(self) -> list[str]:
        """What the clients of the present links have called themselves; "" for one that has not."""
        return self._ask(lambda: sorted(link.name for link in self._links))

    @property
    def waiting(self) -> int:
        """How many pieces of bytes are held or delayed now."""
        return self._ask(lambda: self._waiting)

    def hang_up(self, of: str = "") -> int:
        """Cuts the clients' side alone: bytes that they have sent, and that are held or delayed, still arrive."""
        return self._for_each(of, lambda link: link.client.transport.abort())

    def refuse(self, of: str) -> int:
        """Cuts the links and everyone that is made until `admit`; returns how many there were."""
        self._ask(lambda: self._refused.add(of))
        return self.cut(of)

    def admit(self) -> None:
        """Ends every `refuse`."""
        self._ask(self._refused.clear)

    def trap(self, matching: bytes, loss: Loss, *, of: str = "", times: int = 1) -> Trap:
        """Sets a trap for the next requests that hold these bytes (in one piece of at most 64 KiB), one of each link.

        Of a script that is the name it is called by: `Scripts.digest`.
        """
        trap = Trap(matching, loss, of, times)
        self._ask(lambda: self._traps.append(trap))
        return trap

    def heal(self) -> None:
        """Ends every fault; what is half-open is cut."""

        def heal() -> None:
            for link in self._links:
                if link.stranded:
                    link.cut()
            for rules in (self._holds, self._delays, self._refused, self._traps):
                rules.clear()

        self._ask(heal)

    async def _permitted(self, link: ProxiedLink, way: Way) -> bool:
        self._waiting += 1
        try:
            return await super()._permitted(link, way)
        finally:
            self._waiting -= 1

    def _examine(self, link: ProxiedLink, piece: bytes, way: Way) -> None:
        super()._examine(link, piece, way)
        if way is Way.REPLIES:
            if link in self._doomed:
                link.cut()
            return
        if any(link.belongs_to(of) for of in self._refused):
            link.cut()
        trap = next((t for t in self._traps if t.left and t.matching in piece and link.belongs_to(t.of)), None)
        if trap is None or link in self._doomed or link.over:
            return
        trap.left -= 1
        trap.sprung += 1
        match trap.loss:
            case Loss.UNSENT:
                link.cut()
            case Loss.PARTIAL:
                link.over = True
                link.target.write(piece[: len(piece) // 2])
                link.target.close()
                link.client.transport.abort()
            case Loss.UNKNOWN:
                self._doomed.add(link)
