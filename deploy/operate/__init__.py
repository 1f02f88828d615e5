"""What an operator tells a running mesh: drain, move, settings."""
