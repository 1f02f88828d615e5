"""`python -m deploy.chaos`."""

from __future__ import annotations

from deploy.chaos.command import chaos

if __name__ == "__main__":
    chaos(prog_name="make chaos")
