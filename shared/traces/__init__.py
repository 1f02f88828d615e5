"""OpenTelemetry traces of sequences: what is recorded, which of them, and where they go."""
