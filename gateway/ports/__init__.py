"""Ports: how a gateway listens, how several gateways share a port, and how one leaves a port."""
