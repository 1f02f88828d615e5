"""Faults brought about on purpose: between the processes of a mesh, and in them. `seqmesh chaos`."""

from __future__ import annotations

import os

# gRPC reads it when it is imported. It would tell of every child process that is started beside its threads.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
