"""Runs a mesh on this machine: an embedded Redis, the services as processes, and their supervision."""
