"""Servers that are told what to do while they change their roles."""

from __future__ import annotations

import threading
from pathlib import Path

from deploy.chaos.node import until
from deploy.chaos.replicated import ReplicatedRedis


def test_an_order_is_repeated_until_the_server_takes_it(tmp_path: Path) -> None:
    with ReplicatedRedis(tmp_path, replicas=0) as redis:
        (server,) = redis.servers
        server.kill()
        order = threading.Thread(target=server.order, args=("CONFIG", "SET", "min-replicas-to-write", 3))
        order.start()
        server.start()
        order.join()
        with server.client() as client:
            assert {"min-replicas-to-write": "3"} == client.config_get("min-replicas-to-write")


def test_an_order_is_repeated_when_the_server_cuts_off_whoever_is_connected(tmp_path: Path) -> None:
    """As it does when a Sentinel has changed its role."""
    over = threading.Event()
    with ReplicatedRedis(tmp_path, replicas=0) as redis:
        (server,) = redis.servers

        def cut_off() -> None:
            while not over.is_set():
                server.order("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        cutting = threading.Thread(target=cut_off)
        cutting.start()
        try:
            for count in range(100):
                server.order("CONFIG", "SET", "min-replicas-to-write", count)
        finally:
            over.set()
            cutting.join()
        until(server.answers, "the server answers", 10.0)
