"""Stands for a service in the launcher's tests: `fake_service.py <service> --name=... [--metrics-port=...]`.

Behaviour by environment: FAKE_FAILS names a child that exits at once with code 1; FAKE_STUBBORN one that ignores
SIGTERM; FAKE_FORKS one that forks a process. A gateway answers its readiness with FAKE_READY or 200, a console its
stream with FAKE_STREAM.
"""

from __future__ import annotations

import http.server
import os
import signal
import sys
import threading


def stop(*_: object) -> None:
    os._exit(0)


service, *flags = sys.argv[1:]
given = [flag.removeprefix("--").partition("=") for flag in flags]
values = {name: value for name, _, value in given}
name = values.get("name", service)
print(f"2026-01-01T00:00:00.000Z INFO    quiet name={name}", flush=True)
print(f"2026-01-01T00:00:00.000Z WARNING loud name={name} url={os.environ['SEQMESH_REDIS_URL']}", flush=True)
print(f"umask={os.umask(0)}", flush=True)
if os.environ.get("FAKE_FAILS") == name:
    print("the reason of the failure", file=sys.stderr, flush=True)
    sys.exit(1)
if os.environ.get("FAKE_FORKS") == name and os.fork() == 0:
    signal.pause()
if os.environ.get("FAKE_STUBBORN") == name:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, stop)


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(os.environ.get("FAKE_READY", "200")))
        self.end_headers()
        self.wfile.write(os.environ.get("FAKE_STREAM", "").encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- http.server's name
        pass


port = values.get("metrics-port") or values.get("console-port")
if port:
    http.server.HTTPServer((values["host"], int(port)), Ready).serve_forever()
threading.Event().wait()
