"""The HTTP ports: which clients may hold a connection and for how long, and HTTP/1.1 by llhttp or by Hypercorn."""
