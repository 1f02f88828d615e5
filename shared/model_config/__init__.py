"""Model configuration: `values` (frozen, what the mesh works with) and the way there from `config.pbtxt`."""
