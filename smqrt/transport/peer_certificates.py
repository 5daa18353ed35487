"""Certificates that a TLS peer sent."""

from __future__ import annotations

import _ssl
import ssl


def peer_chain(connection: ssl.SSLObject) -> list[bytes]:
    """Return the certificates that the peer of a TLS connection sent, in DER, its own first."""
    chain = connection._sslobj.get_unverified_chain()  # type: ignore[attr-defined]  # public from Python 3.13 on
    return [certificate.public_bytes(_ssl.ENCODING_DER) for certificate in chain or ()]
