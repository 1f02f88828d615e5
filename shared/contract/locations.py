"""Where a model repository lies: a folder of this machine, or a place in an object store, in Triton's URL forms.

    s3://bucket/path
    s3://host:port/bucket/path          an S3-compatible server, over plain HTTP, as in Triton
    s3://https://host[:port]/bucket/path
    gs://bucket/path
    as://account/container/path

Source: Triton's user guide, "Model Repository Locations". A URL with credentials in it is
refused: command lines and logs would show them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCHEMES = ("s3", "gs", "as")
_FORM = re.compile(r"(?P<scheme>\w+)://(?:(?P<protocol>https?)://)?(?P<host>[^/]+)(?:/(?P<path>.*))?")
_LIST_ITEM = re.compile(rf"(?:{'|'.join(SCHEMES)})://(?:https?://)?[^/:]*(?::\d+(?=/))?[^:]*|[^:]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class RemoteLocation:
    """A repository in an object store.

    endpoint  of S3: URL of the server; "": as the environment says. Of Azure: the account. Of Google: ""
    path      bucket (or container) and the folder in it
    """

    scheme: str
    endpoint: str
    path: str

    def __str__(self) -> str:
        # Triton's shortest form: an address with a port means plain HTTP.
        address = self.endpoint.removeprefix("http://")
        server = address if ":" in address else self.endpoint
        return f"{self.scheme}://{server}{'/' if server else ''}{self.path}"


ModelLocation = Path | RemoteLocation


def parse_location(text: str) -> ModelLocation:
    """The location that a text names. Raises ValueError for no text, or a URL that is none of the forms above."""
    if not text:
        raise ValueError("a model repository's path is empty")
    if "://" not in text:
        return Path(text)
    if "@" in text or "?" in text:
        raise ValueError(
            "a repository's URL holds no credentials: give them in the environment (AWS_ACCESS_KEY_ID, "
            "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_KEY, ...)"
        )
    form = _FORM.fullmatch(text)
    if form is None or form["scheme"] not in SCHEMES:
        raise ValueError(f"'{text}' is no model repository: a folder, s3://, gs:// or as:// is expected")
    if form["protocol"] and form["scheme"] != "s3":
        raise ValueError(f"'{text}' is no model repository: only s3:// takes the address of a server")
    parts = [part for part in (form["path"] or "").split("/") if part]
    endpoint = ""
    if form["protocol"] or (form["scheme"] == "s3" and ":" in form["host"]):
        endpoint = f"{form['protocol'] or 'http'}://{form['host']}"
    elif form["scheme"] == "as":
        # Triton takes the account's address, too: account.blob.core.windows.net.
        endpoint = form["host"].split(".")[0]
    else:
        parts.insert(0, form["host"])
    if not parts or not _NAME.fullmatch(parts[0]):
        raise ValueError(f"'{text}' is no model repository: it names no {'container' if endpoint else 'bucket'}")
    if {".", ".."} & set(parts):
        raise ValueError(f"'{text}' is no model repository: its path must not contain '.' or '..'")
    return RemoteLocation(form["scheme"], endpoint, "/".join(parts))


def is_utf8(path: Path) -> bool:
    """Whether the whole path can be written into JSON, and told to a library that takes UTF-8 alone."""
    try:
        os.path.realpath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def split_locations(text: str) -> Sequence[str]:
    """The locations in a text that separates them by ':', as search paths are written."""
    return _LIST_ITEM.findall(text)
