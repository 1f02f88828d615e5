"""`seqmesh demo`: streams texts through a mesh twice, kills an executor during the second run, and compares both."""

from __future__ import annotations

from deploy.demo.command import main

__all__ = ["main"]
