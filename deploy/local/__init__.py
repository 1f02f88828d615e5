"""A mesh on this machine: its own Redis, the services as processes, their supervision."""
