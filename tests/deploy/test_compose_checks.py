"""What containers of `compose.yaml` ask where Docker gives them a proxy: health checks against a server that is well or
not, and the collector.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import yaml

from deploy.local.embedded import free_port
from tests.markdown_pages import ROOT


class Answering(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path in ("/v2/health/ready", "/api/health", "/-/ready") else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- http.server's name
        pass


@pytest.mark.parametrize("service", ["gateway", "scheduler", "executor"])
def test_spans_go_to_the_collector_itself(service: str) -> None:
    environment = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]["environment"]

    assert urlsplit(environment["OTEL_EXPORTER_OTLP_ENDPOINT"]).hostname == environment["no_grpc_proxy"]


@pytest.mark.parametrize("service", ["gateway", "scheduler", "executor"])
def test_the_collector_is_stopped_behind_those_who_send_it_their_last_spans(service: str) -> None:
    assert "collector" in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]["depends_on"]


@pytest.mark.parametrize(
    ("service", "port"), [("gateway", 8000), ("console", 8003), ("prometheus", 9090), ("grafana", 3000)]
)
@pytest.mark.parametrize("status", [200, 503])
def test_a_service_is_asked_itself_whatever_proxy_docker_gives_to_its_containers(
    monkeypatch: pytest.MonkeyPatch, service: str, port: int, status: int
) -> None:
    monkeypatch.setattr(Answering, "status", status)
    check = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]["healthcheck"]["test"]
    assert "CMD" == check[0]
    assert str(port) in check[-1]
    if "wget" in check and not shutil.which("wget"):
        pytest.skip("no wget here")
    proxy = {"http_proxy": f"http://127.0.0.1:{free_port()}", "no_proxy": "", "NO_PROXY": ""}
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable if word == "python" else str(word) for word in check[1:]]
        command[-1] = command[-1].replace(str(port), str(server.server_port))

        checked = subprocess.run(command, check=False, env={**os.environ, **proxy})
        server.shutdown()

    assert (status == 200) == (checked.returncode == 0)
