"""Stateless requests: the queue that all executors of a model share."""
