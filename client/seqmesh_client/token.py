"""A sequence's place as a short text, for a client that may be restarted: `sm1.`, and a checksum and JSON in base64."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass

from seqmesh_client.errors import WrongToken

VERSION = "sm1"


@dataclass(frozen=True, slots=True)
class Place:
    """Which sequence, and the number of the last step whose outcome its client had."""

    model: str
    version: str
    sequence: int | str
    answered: int

    def token(self) -> str:
        """The place as a text of printable ASCII."""
        text = json.dumps([self.model, self.version, self.sequence, self.answered], separators=(",", ":")).encode()
        return f"{VERSION}.{base64.urlsafe_b64encode(zlib.crc32(text).to_bytes(4) + text).decode().rstrip('=')}"

    @classmethod
    def of_token(cls, token: str) -> Place:
        """The place that a token names. Raises WrongToken."""
        version, dot, body = token.partition(".")
        if not dot or version != VERSION:
            raise WrongToken(f"'{token[:20]}' is no token of this release: it does not begin with '{VERSION}.'")
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            if zlib.crc32(raw[4:]).to_bytes(4) != raw[:4]:
                raise ValueError("its checksum is wrong")
            model, model_version, sequence, answered = json.loads(raw[4:])
        except ValueError as error:
            raise WrongToken(f"the token cannot be read: {error}") from None
        return cls(str(model), str(model_version), sequence, int(answered))
