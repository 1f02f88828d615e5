"""Connections of the HTTP ports: who may hold one and for how long, and HTTP/1.1 on it by h11 and Hypercorn."""
