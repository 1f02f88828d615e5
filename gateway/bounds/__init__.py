"""Bounds of one gateway process: bytes of requests, unread answers, memory, file descriptors."""
