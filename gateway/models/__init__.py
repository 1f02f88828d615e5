"""What the mesh says about its models: the catalog, metadata, statistics, metrics, and the controls of the v2
extensions."""
