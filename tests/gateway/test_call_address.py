"""Where executors reach a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.call_address import call_address
from gateway.settings import GatewaySettings

LOCAL = "redis://127.0.0.1:6379"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "grpc://127.0.0.1:8001"),
        ({"host": "10.1.2.3"}, "grpc://10.1.2.3:8001"),
        ({"host": "::1"}, "grpc://[::1]:8001"),
        ({"host": "0.0.0.0"}, "grpc://127.0.0.1:8001"),  # Redis is on this machine
        ({"host": "0.0.0.0", "redis_url": "unix:///tmp/redis"}, "grpc://127.0.0.1:8001"),
        ({"host": "0.0.0.0", "redis_url": "redis+sentinel://127.0.0.1:26379/mesh"}, "grpc://127.0.0.1:8001"),
        ({"host": "0.0.0.0", "redis_url": "redis+cluster://127.0.0.1:1,10.0.0.1:2"}, "grpc://127.0.0.1:8001"),
        ({"grpc_advertise": "mesh.example:443"}, "grpc://mesh.example:443"),
        ({"grpc_advertise": "none"}, ""),
    ],
)
def test_the_address_that_a_gateway_tells(settings: dict[str, Any], expected: str) -> None:
    given: dict[str, Any] = {"redis_url": LOCAL, **settings}

    assert expected == call_address(GatewaySettings(**given), 8001)


def test_a_port_with_tls_is_told_as_one(tmp_path: Path) -> None:
    files: dict[str, Any] = {"grpc_server_cert": str(tmp_path / "cert"), "grpc_server_key": str(tmp_path / "key")}
    settings = GatewaySettings(redis_url=LOCAL, grpc_use_ssl=True, **files)

    assert "grpcs://127.0.0.1:8001" == call_address(settings, 8001)
