"""What the mesh knows about its models: the catalog, metadata, statistics, metrics, and the v2 control extensions."""
