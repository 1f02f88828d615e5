"""What every process of the mesh does alike: it logs, it stops."""
