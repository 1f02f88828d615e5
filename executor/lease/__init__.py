"""One registration of an executor in the mesh: its lease, what it serves while it holds it, and how it leaves."""
