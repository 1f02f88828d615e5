"""What `seqmesh up` can be told: how many of each service, where they listen, where things are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from deploy.local.embedded import AppendFsync
from shared.contract.locations import ModelLocation
from shared.settings import Count, MeshSettings, setting

TOKEN_LENGTH_MIN = 16
"""A shorter one could be guessed."""


def check_console_token(token: str) -> None:
    """Raises click.UsageError for a token that could be guessed, or that no browser can send. "": none is given"""
    if token and len(token) < TOKEN_LENGTH_MIN:
        raise click.UsageError(f"--console-token needs at least {TOKEN_LENGTH_MIN} characters")
    if not all("!" <= character <= "~" for character in token):
        raise click.UsageError("--console-token takes letters and signs of ASCII alone, and no space")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings(MeshSettings):
    """A whole mesh on this machine."""

    redis_url: str = setting(
        "",
        help="Redis or Valkey of the mesh: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// "
        "(docs/guides/redis.md). By default one is started here.",
        unit="url",
        group="Mesh",
        secret=True,
    )
    models: tuple[ModelLocation, ...] = setting(
        (),
        help="Model repository in Triton's layout: a folder, or a URL of an object store; by default the sample "
        "models. May be repeated (in the environment: separated by ':').",
        unit="repository",
        group="Models",
    )
    gateways: Count = setting(
        1,
        help="Gateways; one uses one core at most. auto: as many as this machine has cores for, beside the executors "
        "and Redis, and no more than one Redis can keep busy.",
        group="Size",
        minimum=1,
    )
    schedulers: int = setting(1, help="Schedulers; one leads each model, the others stand by.", minimum=1)
    executors: int = setting(1, help="Executors; each loads every model.", minimum=1)
    host: str = setting("127.0.0.1", help="Address to listen on; 0.0.0.0 for every interface.", group="Addresses")
    http_port: int = setting(8000, help="Port of the v2 HTTP protocol; 0 picks a free one.", minimum=0, maximum=65535)
    grpc_port: int = setting(8001, help="Port of the v2 gRPC protocol; 0 picks a free one.", minimum=0, maximum=65535)
    metrics_port: int = setting(8002, help="Port of /metrics alone; 0 picks a free one.", minimum=0, maximum=65535)
    share_ports: bool = setting(
        default=True,
        help="Whether all gateways listen on the same HTTP and gRPC port, where the system spreads connections over "
        "them (Linux alone). --no-share-ports: as if each were a machine of its own, the n-th listens on these ports "
        "plus 10 for each before it, and so it does with its metrics in any case.",
    )
    console: bool = setting(default=True, help="Whether a console runs: a page that shows the mesh.", group="Console")
    console_port: int = setting(8003, help="Port of the console; 0 picks a free one.", minimum=0, maximum=65535)
    console_token: str = setting(
        "",
        help="Who gives it to the console may act there: end, pause and move sequences, drain and kill executors. By "
        "default one is made at random, and printed with the console's address.",
        secret=True,
    )
    live: bool = setting(
        default=True,
        help="Whether a terminal shows the mesh in a few lines below the messages: what the console shows, in short.",
    )
    # Below the 15 s for which a gateway lets requests wait for a model whose executors have died.
    restart_pause_max_ms: int = setting(
        5_000,
        help="Longest pause before a process that fails again and again is started again; the first is 200 ms, each "
        "one after that twice the one before.",
        unit="ms",
        group="Restarts",
        minimum=200,
    )
    data_dir: Path = setting(
        Path(".seqmesh"),
        help="Where the embedded server keeps its data, and where logs and mesh.json go.",
        unit="dir",
        group="Data",
    )
    appendfsync: AppendFsync = setting(
        "everysec",
        help="When the embedded server's writes reach the disk. everysec: within a second or two; a stop in order "
        "loses nothing, a power cut or SIGKILL of the server may lose the last of them. always: before they are "
        "acknowledged.",
    )

    def __post_init__(self) -> None:
        """Raises click.UsageError for what the console would end with."""
        check_console_token(self.console_token)
