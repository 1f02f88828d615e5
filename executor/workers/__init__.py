"""The threads that run a model's instances, their devices, and how results become replies."""
