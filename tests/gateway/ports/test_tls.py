"""TLS of a port: files that cannot be used, and certificates that clients do not accept."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from gateway.ports.listening import HTTP_PORT
from gateway.ports.tls import tell_end, tls_context
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


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (-0.01, ["certificate is not valid yet"]),
        (0.0, []),
        (0.89, []),
        (0.91, ["certificate expires soon"]),
        (1.0, ["certificate has expired"]),
    ],
)
def test_a_certificate_near_its_end_is_told_with_the_date(
    share: float, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """share: how much of its life is over"""
    begins, ends = "Nov 21 23:53:11 2026 GMT", "Oct 28 23:53:11 2126 GMT"
    begin_s, end_s = ssl.cert_time_to_seconds(begins), ssl.cert_time_to_seconds(ends)
    tell_end(HTTP_PORT, str(TLS / "server.pem"), begin_s + share * (end_s - begin_s))

    assert told == caplog.messages
    dates = [vars(record)["fields"].get("ends") for record in caplog.records if "expire" in record.getMessage()]
    assert dates == [ends] * len(dates)


def test_each_port_looks_at_its_certificate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("time.time", lambda: ssl.cert_time_to_seconds("Oct 28 23:53:11 2126 GMT"))
    tls_context(
        HTTP_PORT, str(TLS / "server.pem"), str(TLS / "server.key"), "", protocol="http/1.1", asks_clients=False
    )

    assert ["certificate has expired"] == caplog.messages
