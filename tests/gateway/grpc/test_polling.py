"""In which threads the gateway's process reads gRPC's sockets."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a thread waits for"),
    pytest.mark.starts_processes,
]

SERVED = """
import asyncio, os, platform, threading
from pathlib import Path
{before}
from gateway.grpc.polling import read_in_one_thread
read_in_one_thread()
import grpc

async def echo(request, context):
    return request

# The numbers of epoll_wait and epoll_pwait; aarch64 has the second one alone.
WAITING = {{"x86_64": ("232", "281"), "aarch64": ("22",)}}[platform.machine()]

def waits_for_sockets(task):
    # The system call in which a thread is now.
    return (task / "syscall").read_text().split()[0] in WAITING

async def main():
    server = grpc.aio.server()
    handlers = {{"Echo": grpc.unary_unary_rpc_method_handler(echo)}}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        assert await channel.unary_unary("/test/Echo")(b"message") == b"message"
        await asyncio.sleep(0.2)
        own = threading.get_native_id()
        tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != own]
        print(os.environ["GRPC_EXPERIMENTS"], sum(waits_for_sockets(task) for task in tasks))
    await server.stop(None)

asyncio.run(main())
"""


def served(before: str = "") -> tuple[str, int, str]:
    """A server that answered a call: gRPC's experiments, how many threads beside the loop's wait for sockets, and what
    gRPC wrote."""
    code = SERVED.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    experiments, threads = done.stdout.split()
    return experiments, int(threads), done.stderr


def test_one_thread_reads_the_sockets_and_grpc_knows_the_experiment() -> None:
    experiments, threads, written = served()

    assert (experiments, threads) == ("-event_engine_poller_for_python", 1)
    assert "Unknown experiment" not in written


def test_an_operator_who_sets_experiments_chooses_alone() -> None:
    asked = "tcp_rcv_lowat"

    experiments, _, _ = served(f"os.environ['GRPC_EXPERIMENTS'] = {asked!r}")

    assert experiments == asked
