"""A backend of seqmesh, to copy from."""
