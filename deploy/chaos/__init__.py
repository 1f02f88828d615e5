"""Faults brought about on purpose: between the processes of a mesh, and in them. `seqmesh chaos`."""
