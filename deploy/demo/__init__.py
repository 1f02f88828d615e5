"""`seqmesh demo`: streams texts through a mesh twice, kills an executor during the second run, and compares both."""
