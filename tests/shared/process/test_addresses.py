"""How an address is written."""

from __future__ import annotations

import pytest

from shared.process.addresses import authority


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("mesh.local", "mesh.local:80")]
)
def test_an_address_in_a_url(host: str, expected: str) -> None:
    assert expected == authority(host, 80)
