"""A gateway's settings."""

from __future__ import annotations

from gateway.settings import GatewaySettings


def test_defaults_that_clients_of_triton_rely_on() -> None:
    settings = GatewaySettings(memory_max=8 << 30).bounded()

    assert (8000, 8001, 8002) == (settings.http_port, settings.grpc_port, settings.metrics_port)
    assert (64 << 20, "triton", "") == (settings.http_max_input_size, settings.server_id, settings.cache_config)
