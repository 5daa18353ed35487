"""Authentication of a hub's clients by the server's users and rules.

The application's `authenticate` is called for accepted clients only. A client may present, in this order: credentials
in its Connect packet (`name:password`, or a token), the header `Authorization` of its request (Basic, Bearer), the
login of its browser, a client certificate.
"""

from __future__ import annotations

import binascii
import logging
import re
from base64 import b64decode
from collections.abc import Callable
from typing import Any

from smqrt.auth.identity import Identity
from smqrt.auth.service import IdentityService, LoginFailure, LoginRefused, PresentedCredentials
from smqrt.broker.deferred import Deferred
from smqrt.broker.state import BrokerClient, Hooks, Verdict
from smqrt.loop import greenlet_pool
from smqrt.wire.smq import ConnackCode

log = logging.getLogger("smqrt")

MAX_HEADER_BYTES = 16 << 10
TOKEN = re.compile(rb"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*\Z")
"""A JSON Web Token. It has no colon, which every `name:password` has."""
_CODES = {
    LoginFailure.CERTIFICATE: ConnackCode.CERTIFICATE_REJECTED,
    LoginFailure.BUSY: ConnackCode.SERVER_UNAVAILABLE,
    LoginFailure.THROTTLED: ConnackCode.SERVER_UNAVAILABLE,
}

_Authenticate = Callable[[bytes, BrokerClient], Verdict | Deferred[Verdict]]


class HubAuthentication:
    """Calls the identity service, then the application.

    Args:
        service: of the server.
        hooks: of the hub; its `authenticate` is replaced, and called for clients that the service accepts.
    """

    def __init__(self, service: IdentityService, hooks: Hooks) -> None:
        self._service = service
        self._authenticate = hooks.authenticate
        self._keeps_origin = hooks.onconnect is not None
        hooks.authenticate, hooks.has_logins = self.admit, True

    def admit(self, credentials: bytes, client: BrokerClient) -> Verdict | Deferred[Verdict]:
        """See `Hooks.authenticate`."""
        return greenlet_pool.call(self._admit, credentials, client)

    def _admit(self, credentials: bytes, client: BrokerClient) -> Verdict:
        """Decide; in a greenlet, which may block."""
        try:
            identity = self._service.login(shown_by(client, credentials), lambda: not client.closed)
            client.identity = identity
            verdict: Verdict = ConnackCode.ACCEPTED, b""
            if self._authenticate is not None:
                answer: Any = self._authenticate(credentials, client)
                if isinstance(answer, Deferred):
                    answer = greenlet_pool.wait(answer)
                verdict = answer if isinstance(answer, tuple) else (ConnackCode.ACCESS_DENIED, b"")
            fault = self._service.revalidate(identity)  # the application may have blocked for long
            if not verdict[0] and fault is not None:
                verdict, client.identity = (ConnackCode.BAD_CREDENTIALS, fault.encode()), None
            if not self._keeps_origin:
                client.origin = None
            return verdict
        except LoginRefused as refused:
            return _CODES.get(refused.why, ConnackCode.BAD_CREDENTIALS), str(refused).encode()
        except Exception:
            log.exception("error while a client logged in; it is rejected")
            return ConnackCode.SERVER_UNAVAILABLE, b""


def shown_by(client: BrokerClient, credentials: bytes) -> PresentedCredentials:
    """Return the credentials that a client presents."""
    origin = client.origin
    request = origin.request
    pair, token = None, None
    if credentials:
        if TOKEN.match(credentials):
            token = credentials
        else:
            pair = credentials
    else:
        header = request.get("HTTP_AUTHORIZATION" if isinstance(request, dict) else "Authorization") or ""
        scheme, _, value = header.partition(" ") if len(header) <= MAX_HEADER_BYTES else ("", "", "")
        if scheme.lower() == "basic":
            try:
                pair = b64decode(value.strip(), validate=True)
            except (binascii.Error, ValueError):
                pair = b""  # malformed: rejected as a wrong login
        elif scheme.lower() == "bearer":
            token = value.strip().encode("latin-1")
    name, password = None, None
    if pair is not None:
        name_bytes, _, password = pair.partition(b":")
        name = name_bytes.decode("utf-8", "replace")
    verified = getattr(getattr(client.outbox, "transport", None), "peer_certificate", None)
    certificate: bytes | None = verified() if verified else None
    # The login of the browser's session; its identity is None unless it was a login with the server's own users.
    logins = None if isinstance(request, dict) else getattr(request, "logins", None)
    login = logins.of(request) if logins is not None else None
    browser: Identity | None = login.identity if login is not None else None
    return PresentedCredentials(origin.address, client.uid, name, password, token, certificate, browser)
