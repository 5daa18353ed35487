"""Who a client is, and whom it trusts: users, tokens, nkeys, JWTs, TLS, permissions; all with a real server."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import ssl
import time
from binascii import crc_hqx
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import gevent.ssl
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gevent import socket
from gevent.server import StreamServer

from smqrt.cluster.nats import NatsClient, NatsState
from smqrt.cluster.nats.options import UserKey, jwt_fields, nkey_fields
from smqrt.errors import ArgumentError
from smqrt.transport.tls_contexts import ClientTls
from tests.cluster.nats.server import NatsServer
from tests.support.pki import Authority
from tests.support.waiting import wait_until

Make = Callable[..., NatsClient]
Start = Callable[..., NatsServer]


def works(client: NatsClient) -> bool:
    found: list[bytes] = []
    client.subscribe("it.works", lambda _, payload, *__: found.append(payload))
    client.publish("it.works", b"yes")
    assert client.flush(10)
    return found == [b"yes"]


def refused(client: NatsClient, *words: str) -> bool:
    """Waits until it says why it is not let in; it doesn't stop to try."""
    wait_until(lambda: all(word in client.reason for word in words), (words, client.reason))
    return client.state is NatsState.CONNECTING


# ---- users


def test_users_and_what_they_may(start_nats: Start, client: Make, caplog: pytest.LogCaptureFixture) -> None:
    server = start_nats(
        'authorization { users = [ { user: "a", password: "p w" }, { user: "b", password: "q", '
        'permissions: { publish: "b.>", subscribe: "b.>" } } ] }'
    )
    at = f"127.0.0.1:{server.port}"
    assert works(client(f"nats://a:p%20w@{at}"))
    assert works(client(at, user="a", password="p w"))
    wrong = client(f"nats://a:nonsense@{at}", wait=False)
    assert refused(wrong, "Authorization Violation", "check the user and password")
    assert "nonsense" not in wrong.reason + caplog.text
    assert refused(client(at, wait=False), "Authorization Violation")
    assert wrong._pool.next()[1] - time.monotonic() > 10  # slowly
    said: list[str] = []
    limited = client(f"nats://b:q@{at}", on_error=said.append)
    limited.publish("a", b"")
    limited.subscribe("a", print)
    assert limited.flush(10)
    assert ["Publish" in said[0], "Subscription" in said[1]] == [True, True]
    assert limited.counters.denied == 2
    silent = client(f"nats://b:q@{at}")
    silent.publish("a", b"")
    assert silent.flush(10)
    assert 'Permissions Violation for Publish to "a"' in caplog.text


def test_a_token(start_nats: Start, client: Make) -> None:
    server = start_nats('authorization { token: "t0k" }')
    assert works(client(f"nats://t0k@127.0.0.1:{server.port}"))
    assert works(client(server.url, token="t0k"))
    assert refused(client(server.url, token="other", wait=False), "Authorization Violation")


# ---- keys


def text_of(prefix: int, raw: bytes) -> str:
    data = bytes((prefix,)) + raw
    return base64.b32encode(data + crc_hqx(data, 0).to_bytes(2, "little")).decode().rstrip("=")


class Key:
    """An nkey of any kind: operator 14, account 0, user 20."""

    def __init__(self, kind: int) -> None:
        raw = os.urandom(32)
        self._key = Ed25519PrivateKey.from_private_bytes(raw)
        self.public = text_of(kind << 3, self._key.public_key().public_bytes_raw())
        self.seed = text_of(18 << 3 | kind >> 2, bytes(((kind << 3 & 31) << 3,)) + raw)

    def jwt(self, subject: str, claims: dict[str, object]) -> str:
        """A JWT as nsc makes it."""
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        body = {"jti": "x", "iat": int(time.time()), "iss": self.public, "name": "n", "sub": subject, "nats": claims}
        parts = [base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in (head, body)]
        signature = self._key.sign(".".join(parts).encode())
        return ".".join([*parts, base64.urlsafe_b64encode(signature).decode().rstrip("=")])


def test_an_nkey(start_nats: Start, client: Make, tmp_path: Path) -> None:
    key, other = Key(20), Key(20)
    assert UserKey(key.seed).public == key.public
    server = start_nats(f"authorization {{ users = [ {{ nkey: {key.public} }} ] }}")
    file = tmp_path / "user.nk"
    file.write_text(other.seed + "\n")
    one = client(server.url, nkey_file=file, wait=False, refused_s=0.2)
    assert refused(one, "Authorization Violation")
    file.write_text(key.seed + "\n")  # read for each connection
    assert one.wait_connected(20)
    assert works(one)
    assert refused(client(server.url, nkey_file=tmp_path / "none", wait=False), "cannot read")


def test_a_credentials_file(start_nats: Start, client: Make, tmp_path: Path) -> None:
    operator, account, user = Key(14), Key(0), Key(20)
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    operator_jwt = operator.jwt(operator.public, {"type": "operator", "version": 2})
    account_jwt = operator.jwt(
        account.public, {"type": "account", "version": 2, "limits": limits | {"wildcards": True}}
    )
    user_jwt = account.jwt(user.public, {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1})
    server = start_nats(
        f"operator: {operator_jwt}\nresolver: MEMORY\nresolver_preload: {{ {account.public}: {account_jwt} }}"
    )
    file = tmp_path / "user.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\nIMPORTANT\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    assert works(client(server.url, credentials_file=file))
    assert refused(client(server.url, wait=False), "Authorization Violation")


def test_files_that_hold_no_credentials(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content, words in (
        ("", "not an nkey"),
        (Key(20).public, "begins with SU"),
        (Key(0).seed, "an account, an operator"),
        ("".join(sorted(Key(20).seed)), "not an nkey"),
        ("é" * 10, "not an nkey"),
    ):
        file.write_text(content)
        with pytest.raises(ArgumentError, match=words) as caught:
            nkey_fields(str(file), "n")
        assert content[:20] not in str(caught.value) or not content
    with pytest.raises(ArgumentError, match="make it with nsc"):
        jwt_fields(str(file), "n")
    file.write_bytes(b"\xff")
    with pytest.raises(ArgumentError, match="is not text"):
        jwt_fields(str(file), "n")


# ---- TLS


def tls(authority: Authority, name: str, host: str = "127.0.0.1", more: str = "") -> str:
    cert, key = authority.pair(name, host)
    return f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{authority.path}", timeout: 5, {more} }}'


def test_tls(start_nats: Start, client: Make, certificates: Authority) -> None:
    server = start_nats(tls(certificates, "server"))
    one = client(server.url, tls_ca=certificates.path, ping_s=3600)  # the server wants TLS in any case
    found: list[int] = []
    one.subscribe("bulk", lambda _, payload, *__: found.append(len(payload)))
    sizes = [10, 100_000, 1_000_000, 0]
    for size in sizes:
        one.publish("bulk", bytes(size))
    wait_until(lambda: len(found) == len(sizes))
    assert found == sizes
    assert works(client(f"tls://127.0.0.1:{server.port}", tls_ca=certificates.path))
    # Many records come in one read: those behind the first are not forgotten.
    other = client(server.url, tls_ca=certificates.path)
    one._connection._watcher.stop()  # type: ignore[union-attr]
    for _ in range(50):
        other.publish("bulk", b"")
        other.flush(10)
    one._connection._watcher.start(one._connection._readable)  # type: ignore[union-attr]
    wait_until(lambda: len(found) == len(sizes) + 50)
    assert refused(client(server.url, wait=False), "is not trusted", "give tls_ca")
    plain = start_nats()
    assert refused(client(f"tls://127.0.0.1:{plain.port}", wait=False), "does not support TLS")
    assert refused(client(plain.url, tls_ca=certificates.path, wait=False), "does not support TLS")


def test_names_of_certificates(start_nats: Start, client: Make, certificates: Authority) -> None:
    server = start_nats(tls(certificates, "named", "nats.example"))
    assert refused(client(server.url, tls_ca=certificates.path, wait=False), "give tls_hostname")
    assert works(client(server.url, tls_ca=certificates.path, tls_hostname="nats.example"))


def test_certificates_of_clients(start_nats: Start, client: Make, certificates: Authority) -> None:
    server = start_nats(tls(certificates, "server", more="verify: true"))
    cert, key = certificates.pair("me", "me.example")
    assert works(client(server.url, tls_ca=certificates.path, tls_cert=cert, tls_key=key))
    given = ClientTls.from_files(str(certificates.path), str(cert), str(key))
    assert works(client(server.url, tls=given))
    without = client(server.url, tls_ca=certificates.path, wait=False)
    wait_until(lambda: without.reason != "not tried yet")
    assert re.search("ssl|socketclosed|socketreadfailed", without.reason)
    assert not without.connected


def test_tls_before_anything_is_said(start_nats: Start, client: Make, certificates: Authority) -> None:
    server = start_nats()
    context = gevent.ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates.pair("front", "127.0.0.1"))

    def pump(source: Any, target: Any) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        target.shutdown(2)

    def serve(sock: Any, _address: Any) -> None:
        behind = socket.create_connection(("127.0.0.1", server.port))
        gevent.joinall([gevent.spawn(pump, sock, behind), gevent.spawn(pump, behind, sock)])

    with_tls = StreamServer(("127.0.0.1", 0), serve, ssl_context=context)
    with_tls.start()
    try:
        url = f"nats://127.0.0.1:{with_tls.server_port}"
        assert works(client(url, tls_ca=certificates.path, tls_first=True))
        assert refused(client(url, tls_first=True, wait=False), "give tls_ca")
    finally:
        with_tls.stop(0)
