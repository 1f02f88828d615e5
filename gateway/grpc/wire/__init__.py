"""gRPC over HTTP/2: connections, calls and their messages. What a call means is decided above (`gateway.grpc`)."""
