"""`seqmesh new`: a model to begin with."""
