"""`seqmesh analyze`: finds the configuration of a model that serves most within bounds."""
