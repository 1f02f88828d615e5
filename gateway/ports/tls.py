"""TLS of a port."""

from __future__ import annotations

import ssl

from hypercorn.config import Config


def tls_context(cert: str, key: str, ca: str, *, protocol: str, asks_clients: bool) -> ssl.SSLContext:
    """The context of a port that speaks TLS, as Hypercorn makes it.

    cert, key, ca  files (PEM); ca: of the authority that has signed clients' certificates, "" for none
    protocol       what is spoken inside, as ALPN names it
    asks_clients   whether clients must show a certificate
    raises         OSError (ssl.SSLError is one) for a file that cannot be read
    """
    config = Config()
    config.certfile, config.keyfile, config.ca_certs = cert, key, ca or None
    config.alpn_protocols = [protocol]
    if asks_clients:
        config.verify_mode = ssl.CERT_REQUIRED
    context = config.create_ssl_context()
    assert context is not None, "there is a certificate"
    return context
