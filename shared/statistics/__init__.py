"""Counts and reports of models: built by executors and scripts, added up and read by every gateway."""
