"""`python -m benchmarks`."""

from __future__ import annotations

from benchmarks.command import bench

if __name__ == "__main__":
    bench(prog_name="make bench")
