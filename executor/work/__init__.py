"""Stateless requests on an executor: which of the queue run together, and their answers."""
