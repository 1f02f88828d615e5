"""`python -m deploy.bench`."""

from __future__ import annotations

from deploy.bench.command import bench

if __name__ == "__main__":
    bench(prog_name="make bench")
