"""Settings by which the operators' commands find the running mesh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.settings import setting
from shared.store.keyspace import DEFAULT_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """A mesh that runs."""

    redis_url: str = setting(
        "",
        help="Redis or Valkey of the mesh; by default that of the mesh which `seqmesh up` runs in --data-dir.",
        unit="url",
        group="Mesh",
        secret=True,
    )
    key_prefix: str = setting(
        "",
        help=f"Beginning of the mesh's keys; by default that of --data-dir, or {DEFAULT_PREFIX} with --redis-url.",
        group="Mesh",
    )
    data_dir: Path = setting(Path(".seqmesh"), help="Where `seqmesh up` keeps its data.", unit="dir", group="Mesh")
