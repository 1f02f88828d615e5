"""`seqmesh chaos`: causes faults in the processes of a mesh and between them, and checks every answer."""

from __future__ import annotations

import os

# gRPC reads this when it is imported. Otherwise it logs a line for every child process that is started.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
