"""Backends: what runs a model. torch is imported in here and nowhere else."""
