"""A sequence's place as a short text, for a client that may be restarted: `sm1.`, and a checksum and JSON in base64."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import astuple, dataclass

from seqmesh_client.errors import WrongToken

VERSION = "sm1"


@dataclass(frozen=True, slots=True)
class Place:
    """Which sequence, and how far its client is.

    answered  number of the last step whose outcome the client had
    run       what the mesh calls this run of the sequence, "" where no answer has told: another run under the same id
              has another name
    over      the sequence has ended
    """

    model: str
    version: str
    sequence: int | str
    answered: int
    run: str = ""
    over: bool = False

    def token(self) -> str:
        """The place as a text of printable ASCII."""
        text = json.dumps(astuple(self), separators=(",", ":")).encode()
        return f"{VERSION}.{base64.urlsafe_b64encode(zlib.crc32(text).to_bytes(4) + text).decode().rstrip('=')}"

    @classmethod
    def of_token(cls, token: str) -> Place:
        """The place that a token names. Raises WrongToken."""
        if not isinstance(token, str):  # pyright: ignore[reportUnnecessaryIsInstance]  what a program kept for a token
            raise WrongToken(f"a token is a text, and this is of type {type(token).__name__}")
        version, dot, body = token.partition(".")
        if not dot or version != VERSION:
            raise WrongToken(f"'{token[:20]}' is no token of this release: it does not begin with '{VERSION}.'")
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            if zlib.crc32(raw[4:]).to_bytes(4) != raw[:4]:
                raise ValueError("its checksum is wrong")
            model, model_version, sequence, answered, run, over = json.loads(raw[4:])
        except ValueError as error:
            raise WrongToken(f"the token cannot be read: {error}") from None
        return cls(str(model), str(model_version), sequence, int(answered), str(run), bool(over))
