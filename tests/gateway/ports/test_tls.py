"""TLS of a port: files that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.ports.listening import HTTP_PORT
from gateway.ports.tls import tls_context
from shared.contract.errors import UnavailableError

TLS = Path(__file__).parents[2] / "fixtures" / "tls"


@pytest.mark.parametrize(
    ("cert", "key", "ca"),
    [
        ("nowhere.pem", "server.key", ""),
        ("server.pem", "nowhere.key", ""),
        ("server.pem", "client.key", ""),
        ("server.key", "server.pem", ""),
        ("server.pem", "server.key", "nowhere.pem"),
    ],
)
def test_files_that_cannot_be_used_are_named(cert: str, key: str, ca: str) -> None:
    cert, key, ca = (str(TLS / name) if name else "" for name in (cert, key, ca))

    with pytest.raises(UnavailableError, match=f"^HTTP cannot speak TLS with .*{key}.*: .*"):
        tls_context(HTTP_PORT, cert, key, ca, protocol="http/1.1", asks_clients=bool(ca))


def test_nobody_is_asked_for_the_password_of_a_key(capfd: pytest.CaptureFixture[str]) -> None:
    """A service has no terminal, and one that is started by hand would wait."""
    cert, key = str(TLS / "server.pem"), str(TLS / "encrypted.key")

    with pytest.raises(UnavailableError, match="a key without a password"):
        tls_context(HTTP_PORT, cert, key, "", protocol="http/1.1", asks_clients=False)

    assert "pass phrase" not in "".join(capfd.readouterr())
