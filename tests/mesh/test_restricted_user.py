"""The user of Redis that the manual gives the mesh may do all that a mesh does, and nothing else."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from tests.embedded_redis import EmbeddedRedis
from tests.markdown_pages import ROOT
from tests.mesh.model_repository import add_sum_model
from tests.mesh.raw_http import get
from tests.mesh.running_mesh import running_mesh, seqmesh
from tests.mesh.traffic import Callers, Traffic, make_plans

MODEL = "running_sum"
NAME, PASSWORD = "mesh", "a-long-random-password"


def documented_user() -> list[str]:
    """The words of the line `user ...` in the manual."""
    (line,) = re.findall(r"^user (.*)$", (ROOT / "docs/guides/redis.md").read_text(), re.MULTILINE)
    return line.split()


async def test_a_mesh_runs_as_the_user_that_the_manual_gives_it(tmp_path: Path, chance: random.Random) -> None:
    add_sum_model(tmp_path / "models", MODEL)
    with EmbeddedRedis(tmp_path / "redis") as server, Redis.from_url(server.url) as operator:
        untyped = cast("Any", operator)
        untyped.execute_command("ACL", "SETUSER", *documented_user())
        url = f"redis://{NAME}:{PASSWORD}@{server.address}/0"
        with running_mesh(
            tmp_path / "data", [tmp_path / "models"], executors=2, environment={"SEQMESH_REDIS_URL": url}
        ) as mesh:
            async with Callers(mesh) as callers:
                traffic = Traffic(MODEL, callers, make_plans(chance, 8), chance, retries=True, numbered=True)
                await traffic.run()
            assert "drained" in await seqmesh(mesh, "drain", "executor-2")
            assert "serves again" in await seqmesh(mesh, "drain", "executor-2", "--undo")
            await seqmesh(mesh, "doctor")
            assert b"\nseqmesh_redis_memory_used_bytes " in get(mesh.http(), "/metrics").body

        assert [] == untyped.acl_log()
        with Redis.from_url(url) as mesh_user:
            for words in (["FLUSHALL"], ["CONFIG", "SET", "maxmemory", "1"], ["SET", "other", "1"], ["KEYS", "*"]):
                with pytest.raises(NoPermissionError):
                    cast("Any", mesh_user).execute_command(*words)
