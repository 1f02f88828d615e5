"""A sequence's place as a short text, for a client that may be restarted: `sm1.`, and a checksum and JSON in base64."""

from __future__ import annotations

import base64
import json
import operator
import secrets
import zlib
from dataclasses import astuple, dataclass, replace
from typing import Any

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
    def of(cls, model: Any, version: Any, id: Any, after: Any) -> Place:
        """The place that a program names: `AsyncClient.sequence`. Raises TypeError or ValueError for what is none."""
        for name, value in (("model", model), ("version", version)):
            if not isinstance(value, str):
                raise TypeError(f"a sequence's {name} is a text, not a value of type {type(value).__name__}")
        try:
            answered = operator.index(after)
        except TypeError:
            raise TypeError(f"after is a number of steps, not a value of type {type(after).__name__}") from None
        if not 0 <= answered < 1 << 63:
            raise ValueError(f"after says how many steps have an outcome, 0 or more: {answered} is no such number")
        return cls(model, version, sequence_id(id), answered)

    @classmethod
    def of_token(cls, token: str) -> Place:
        """The place that a token names. Raises WrongToken."""
        if not isinstance(token, str):  # pyright: ignore[reportUnnecessaryIsInstance]  what a program kept for a token
            raise WrongToken(f"a token is a text, and this is of type {type(token).__name__}")
        # What was kept in a file has a line's end behind it.
        version, dot, body = token.strip().partition(".")
        if not dot or version != VERSION:
            raise WrongToken(f"'{token[:20]}' is no token of this release: it does not begin with '{VERSION}.'")
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            if zlib.crc32(raw[4:]).to_bytes(4) != raw[:4]:
                raise ValueError("its checksum is wrong")
            model, model_version, sequence, answered, run, over = json.loads(raw[4:])
            if sequence is None:
                raise ValueError("it names no sequence")
            return replace(cls.of(model, model_version, sequence, answered), run=str(run), over=bool(over))
        except (ValueError, TypeError, RecursionError) as error:
            raise WrongToken(f"the token cannot be read: {error}") from None


def sequence_id(id: int | str | None) -> int | str:
    """The id that a caller gives. None: one that no other client takes, of 63 bits, from 1; models whose CORRID control
    is text need one of their own.

    raises  ValueError for an integer beyond 64 bits, which would be sent as that of another sequence; TypeError for
            what is neither a text nor an integer
    """
    if id is None:
        return secrets.randbelow((1 << 63) - 1) + 1
    if isinstance(id, str):
        return id
    try:
        number = int(operator.index(id))
    except TypeError:
        raise TypeError(f"a sequence's id is a text or an integer, not a value of type {type(id).__name__}") from None
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"a sequence's id has at most 64 bits: {number} has more")
    return number
