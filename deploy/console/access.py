"""Who may read the console and who may act; and what every answer of it says to the browser.

Reading is open on a loopback address, as the gateways' list of sequences is: whoever knows an id can go on with its
sequence. On another address it needs the token. Acting needs the token anywhere.

The token travels in the header `Authorization`, which the page sets itself. There is no cookie: a browser would send
one with requests of foreign pages, and to every other port of the same host.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from shared.contract.errors import Code, RequestError
from shared.origins import Origins

SCHEME = "bearer "
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)
"""Nothing inline and nothing foreign: whatever a sequence is called, it is text."""
SECURITY_HEADERS = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one console. is_loopback: only this machine reaches its port"""

    token: str
    origins: Origins
    is_loopback: bool

    def check_reader(self, headers: Mapping[str, str]) -> None:
        """Raises RequestError for somebody who may not read."""
        if not self.is_loopback:
            self.check_actor(headers)

    def check_actor(self, headers: Mapping[str, str]) -> None:
        """Raises RequestError for somebody who may not act."""
        if not self.is_signed_in(headers):
            raise RequestError("sign in with the token that the console printed when it started", Code.FORBIDDEN)

    def is_signed_in(self, headers: Mapping[str, str]) -> bool:
        """Whether a request carries the token. Compared in constant time."""
        given = headers.get("authorization", "")
        token = given[len(SCHEME) :] if given.lower().startswith(SCHEME) else ""
        return hmac.compare_digest(token.encode(), self.token.encode())
