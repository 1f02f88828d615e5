"""Requests on their way to Redis and back: what sends them, hears their answers, and looks over them after a loss."""
