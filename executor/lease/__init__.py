"""One registration of an executor in the mesh: its lease, the models that it serves meanwhile, and how it leaves."""
