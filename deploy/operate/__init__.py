"""Commands by which an operator changes a running mesh: drain, move, settings."""
