"""`seqmesh demo`: texts streamed through a mesh twice, the second time while an executor is killed; both must agree."""

from __future__ import annotations

from deploy.demo.command import main

__all__ = ["main"]
