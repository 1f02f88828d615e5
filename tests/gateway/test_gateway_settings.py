"""A gateway's settings."""

from __future__ import annotations

import pytest

from gateway.settings import GatewaySettings
from shared.settings import parse_settings


def test_defaults_that_clients_of_triton_rely_on() -> None:
    settings = GatewaySettings(memory_max=8 << 30).bounded()

    assert (8000, 8001, 8002) == (settings.http_port, settings.grpc_port, settings.metrics_port)
    assert (64 << 20, "triton", "") == (settings.http_max_input_size, settings.server_id, settings.cache_config)


def test_a_bound_of_connections_at_which_grpc_ends_the_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(GatewaySettings, ["--grpc-max-connections", str((1 << 31) - 1)], program="gateway", help="")

    assert "2147483647 is not in the range 0<=x<=2147483646" in capsys.readouterr().err
