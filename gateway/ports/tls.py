"""TLS of a port."""

from __future__ import annotations

import ssl

from hypercorn.config import Config

from gateway.ports.listening import PortName
from shared.contract.errors import UnavailableError


def tls_context(of: PortName, cert: str, key: str, ca: str, *, protocol: str, asks_clients: bool) -> ssl.SSLContext:
    """The context of a port that speaks TLS, as Hypercorn makes it.

    cert, key, ca  files (PEM); ca: of the authority that has signed clients' certificates, "" for none
    protocol       what is spoken inside, as ALPN names it
    asks_clients   whether clients must show a certificate
    raises         UnavailableError for a file that cannot be read, and a key that is encrypted
    """
    config = Config()
    config.certfile, config.keyfile, config.ca_certs = cert, key, ca or None
    config.keyfile_password = ""  # else OpenSSL asks the terminal for the one of an encrypted key, and waits
    config.alpn_protocols = [protocol]
    if asks_clients:
        config.verify_mode = ssl.CERT_REQUIRED
    try:
        context = config.create_ssl_context()
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (cert, key, ca)))
        raise UnavailableError(
            f"{of.protocol} cannot speak TLS with {files}: {error} (PEM files are needed, and a key without a password)"
        ) from error
    assert context is not None, "there is a certificate"
    return context
