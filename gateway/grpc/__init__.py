"""The v2 protocol over gRPC: pure codec, servicer, streams, health, server."""
