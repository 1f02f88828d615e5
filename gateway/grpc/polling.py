"""Which of gRPC's two ways of reading sockets the gateway's process uses.

From grpcio 1.80 on, threads of gRPC's event engine read the sockets. They hand what they read to the thread that waits
for events, from which it goes on to the event loop. Before, the thread that waits for events read the sockets itself,
and it still can. On streams that takes a sixth off a gateway's CPU.

Source: grpc's experiment event_engine_poller_for_python (default since 1.80). The measurements:
docs/decisions/0066-grpc-reads-in-one-thread.md.
"""

from __future__ import annotations

import os

EXPERIMENTS = "GRPC_EXPERIMENTS"
READ_WHERE_EVENTS_ARE_AWAITED = "-event_engine_poller_for_python"


def read_in_one_thread() -> None:
    """Has gRPC read its sockets in the thread that waits for events. To be called before `grpc` is imported.

    An operator who sets GRPC_EXPERIMENTS chooses alone.
    """
    os.environ.setdefault(EXPERIMENTS, READ_WHERE_EVENTS_ARE_AWAITED)
