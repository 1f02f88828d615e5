"""TLS of a port."""

from __future__ import annotations

import ssl
import time

from hypercorn.config import Config

from gateway.ports.listening import PortName
from shared.contract.errors import UnavailableError
from shared.process import logs


def tls_context(of: PortName, cert: str, key: str, ca: str, *, protocol: str, asks_clients: bool) -> ssl.SSLContext:
    """The context of a port that speaks TLS, as Hypercorn makes it. Warns as `tell_end`.

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
        tell_end(of, cert, time.time())
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (cert, key, ca)))
        raise UnavailableError(
            f"{of.protocol} cannot speak TLS with {files}: {error} (PEM files are needed, and a key without a password)"
        ) from error
    assert context is not None, "there is a certificate"
    return context


def tell_end(of: PortName, cert: str, now_s: float) -> None:
    """Warns of a certificate (PEM) that clients do not accept at that time, or of whose life a tenth is left."""
    # The standard library tells this of its peers' certificates alone, but for this function of its own tests.
    decode = getattr(getattr(ssl, "_ssl", None), "_test_decode_cert", None)
    if decode is None:
        return
    told = decode(cert)
    begin_s, end_s = ssl.cert_time_to_seconds(told["notBefore"]), ssl.cert_time_to_seconds(told["notAfter"])
    if now_s < begin_s:
        logs.warning("certificate is not valid yet", port=of.protocol, file=cert, begins=told["notBefore"])
    elif now_s >= end_s - (end_s - begin_s) / 10:
        event = "certificate has expired" if now_s >= end_s else "certificate expires soon"
        logs.warning(event, port=of.protocol, file=cert, ends=told["notAfter"])
