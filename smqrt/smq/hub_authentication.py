"""The gate of a hub: clients prove who they are to the server's identity service before the application is asked.

A client may show, in this order: credentials in its Connect packet (`name:password`, or a token), the header
`Authorization` of the request that it came with (Basic, Bearer), the login of the browser that it came from, a client
certificate.
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
"""A JSON Web Token: a colon, which stands behind every user name, is no part of it."""
_CODES = {
    LoginFailure.CERTIFICATE: ConnackCode.CERTIFICATE_REJECTED,
    LoginFailure.BUSY: ConnackCode.SERVER_UNAVAILABLE,
    LoginFailure.THROTTLED: ConnackCode.SERVER_UNAVAILABLE,
}

_Authenticate = Callable[[bytes, BrokerClient], Verdict | Deferred[Verdict]]


class HubAuthentication:
    """Asks the identity service, then the application.

    Args:
        service: of the server.
        hooks: of the hub; its `authenticate` is asked for those whom the service lets in.
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
        """In a greenlet, which may block."""
        try:
            return self._decide(credentials, client)
        except Exception:
            log.exception("error while a client logged in; it is not let in")
            return ConnackCode.SERVER_UNAVAILABLE, b""

    def _decide(self, credentials: bytes, client: BrokerClient) -> Verdict:
        try:
            identity = self._service.login(shown_by(client, credentials), lambda: not client.closed)
        except LoginRefused as refused:
            return _CODES.get(refused.why, ConnackCode.BAD_CREDENTIALS), str(refused).encode()
        client.identity = identity
        verdict = _asked(self._authenticate, credentials, client)
        fault = self._service.revalidate(identity)  # time has gone by
        if not verdict[0] and fault is not None:
            verdict, client.identity = (ConnackCode.BAD_CREDENTIALS, fault.encode()), None
        if not self._keeps_origin:
            client.origin = None
        return verdict


def _asked(hook: _Authenticate | None, credentials: bytes, client: BrokerClient) -> Verdict:
    if hook is None:
        return ConnackCode.ACCEPTED, b""
    answer: Any = hook(credentials, client)
    if isinstance(answer, Deferred):
        answer = greenlet_pool.wait(answer)
    return answer if isinstance(answer, tuple) else (ConnackCode.ACCESS_DENIED, b"")


def shown_by(client: BrokerClient, credentials: bytes) -> PresentedCredentials:
    """What a client shows."""
    origin = client.origin
    name, password, token = None, None, None
    if credentials:
        if TOKEN.match(credentials):
            token = credentials
        else:
            name, password = _name_and_password(credentials)
    else:
        scheme, _, value = _authorization(origin.request).partition(" ")
        if scheme.lower() == "basic":
            name, password = _basic(value)
        elif scheme.lower() == "bearer":
            token = value.strip().encode("latin-1")
    certificate = _certificate(client)
    return PresentedCredentials(origin.address, client.uid, name, password, token, certificate, _login(origin.request))


def _name_and_password(credentials: bytes) -> tuple[str, bytes]:
    name, _, password = credentials.partition(b":")
    return name.decode("utf-8", "replace"), password


def _basic(value: str) -> tuple[str, bytes]:
    try:
        data = b64decode(value.strip(), validate=True)
    except (binascii.Error, ValueError):
        data = b""
    name, _, password = data.partition(b":")
    return name.decode("utf-8", "replace"), password


def _authorization(request: Any) -> str:
    value = request.get("HTTP_AUTHORIZATION") if isinstance(request, dict) else request.get("Authorization")
    return value if value is not None and len(value) <= MAX_HEADER_BYTES else ""


def _certificate(client: BrokerClient) -> bytes | None:
    """The certificate that TLS has verified."""
    shown = getattr(getattr(client.outbox, "transport", None), "peer_certificate", None)
    der: bytes | None = shown() if shown else None
    return der


def _login(request: Any) -> Identity | None:
    """Who is logged in with the browser's session, if that was by the server's own users."""
    logins = None if isinstance(request, dict) else getattr(request, "logins", None)
    login = logins.of(request) if logins is not None else None
    found: Identity | None = login.identity if login is not None else None
    return found
