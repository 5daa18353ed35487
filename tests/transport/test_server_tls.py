"""The TLS of a listener: certificates by name, client certificates, lists of revoked ones, and all of it read again."""

from __future__ import annotations

import os
import resource
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import time
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import Encoding
from gevent import socket
from gevent.ssl import SSLContext

from smqrt.errors import StartError
from smqrt.transport import tls as tls_module
from smqrt.transport.listener import Listener
from smqrt.transport.server_tls import ListenerTls, TlsFiles
from smqrt.transport.tls import TlsTransport
from tests.support.pki import Authority

DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("made"))


class Clock:
    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


class Port:
    """A listener with TLS, and clients of the standard library."""

    def __init__(self, files: TlsFiles, clock: Clock) -> None:
        self.tls = ListenerTls(files, clock)
        self.accepted: list[TlsTransport] = []
        self.listener = Listener("127.0.0.1", 0, self._take, self.tls.context)
        self.listener.start()
        self.clients: list[Any] = []

    def _take(self, transport: TlsTransport, address: object) -> None:
        self.accepted.append(transport)
        transport.send(b"!")

    def reload(self) -> str | None:
        fault = self.tls.reload()
        self.listener.renew(self.tls.context)
        return fault

    def client(
        self,
        name: str | None = None,
        pair: tuple[Path, Path] | None = None,
        version: str = "TLSv1_3",
        alpn: list[str] | None = None,
        session: Any = None,
        ciphers: str = "",
        context: Any = None,
    ) -> Any:
        """A connection that has shaken hands and has heard a byte of ours (TLS 1.3 refuses a client afterwards)."""
        if context is None:
            context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
            if alpn:
                context.set_alpn_protocols(alpn)
            if pair:
                context.load_cert_chain(*pair)
            if ciphers:
                context.set_ciphers(ciphers)
        sock = socket.create_connection(self.listener.address, timeout=5)
        client = context.wrap_socket(sock, server_hostname=name, session=session)
        self.clients.append(client)
        assert client.recv(1) == b"!", "refused"
        return client

    def shown(self, name: str | None = None, **more: Any) -> bytes:
        """The certificate that a client gets to see."""
        return bytes(self.client(name, **more).getpeercert(binary_form=True))

    def close(self) -> None:
        for one in [*self.clients, *self.accepted, self.listener]:
            one.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def port(clock: Clock) -> Iterator[Callable[..., Port]]:
    ports: list[Port] = []

    def open_port(*pairs: tuple[Path, Path], **more: Any) -> Port:
        texts = {name: str(value) if isinstance(value, Path) else value for name, value in more.items()}
        ports.append(Port(TlsFiles(tuple((str(cert), str(key)) for cert, key in pairs), **texts), clock))
        return ports[-1]

    yield open_port
    for one in ports:
        one.close()


def der(cert: Path) -> bytes:
    return x509.load_pem_x509_certificate(cert.read_bytes()).public_bytes(Encoding.DER)


def copy(pair: tuple[Path, Path], onto: tuple[Path, Path]) -> None:
    for one, other in zip(pair, onto, strict=True):
        other.write_bytes(one.read_bytes())


# ---- names


def test_certificates_by_name(port: Any, made: Authority) -> None:
    default, site, wild = (
        made.pair("default", "a.example"), made.pair("site", "b.example"), made.pair("wild", "*.b.example"),
    )  # fmt: skip
    opened = port(default, site, wild)
    asked = {
        None: default, "a.example": default, "b.example": site, "B.Example": site, "x.b.example": wild,
        "y.x.b.example": default, "unknown.example": default, "example": default,
    }  # fmt: skip
    for name, pair in asked.items():
        assert opened.shown(name) == der(pair[0]), name
    assert opened.shown("b.example", version="TLSv1_2") == der(site[0])


def test_two_kinds_of_keys_for_a_name(port: Any, made: Authority) -> None:
    rsa = made.pair("rsa", "a.example", key_type=trustme.KeyType.RSA)
    opened = port(made.pair("ec", "a.example"), rsa)
    assert opened.shown("a.example", version="TLSv1_2", ciphers="ECDHE-RSA-AES128-GCM-SHA256") == der(rsa[0])
    assert opened.shown("a.example") != der(rsa[0])


def test_alpn(port: Any, made: Authority) -> None:
    opened = port(made.pair("server"), alpn=("http/1.1",))
    assert opened.client(alpn=["h2", "http/1.1"]).selected_alpn_protocol() == "http/1.1"
    assert opened.client(alpn=["h2"]).selected_alpn_protocol() is None
    assert opened.client().selected_alpn_protocol() is None


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
def test_versions(port: Any, made: Authority) -> None:
    newest = port(made.pair("server"), minimum="1.3")
    assert newest.client().version() == "TLSv1.3"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        newest.client(version="TLSv1_2")
    usual = port(made.pair("server"))
    assert usual.client(version="TLSv1_2").version() == "TLSv1.2"
    old = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        usual.client(context=old)


# ---- clients' certificates

REFUSED = (ssl.SSLError, ConnectionError, AssertionError)


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_client_certificates(port: Any, made: Authority, tmp_path: Path, version: str) -> None:
    server, ours, strangers = made.pair("server"), made.pair("client"), Authority(tmp_path).pair("stranger")
    outcomes = {}
    for mode in ("none", "optional", "required", None):
        opened = port(server, client_ca=made.path, client_certificate=mode)
        for who, pair in {"nobody": None, "ours": ours, "stranger": strangers}.items():
            try:
                opened.client(pair=pair, version=version)
                outcomes[mode, who] = opened.accepted[-1].peer_certificate() is not None
            except REFUSED:
                outcomes[mode, who] = None
    optional = {"nobody": False, "ours": True, "stranger": None}
    expected = {
        "none": {"nobody": False, "ours": False, "stranger": False},
        "optional": optional, "required": optional | {"nobody": None}, None: optional,
    }  # fmt: skip
    assert outcomes == {(mode, who): end for mode, ends in expected.items() for who, end in ends.items()}


def test_revoked_clients(port: Any, made: Authority, tmp_path: Path) -> None:
    server, good, bad = made.pair("server"), made.pair("good"), made.pair("bad")
    crl = made.revocation_list(tmp_path / "crl.pem")
    opened = port(server, client_ca=made.path, client_crl=crl)
    kept = opened.client(pair=bad)
    made.revocation_list(crl, bad[0])
    assert opened.reload() is None
    opened.client(pair=good)
    opened.client()
    with pytest.raises(REFUSED):
        opened.client(pair=bad)
    opened.accepted[0].send(b"?")
    assert kept.recv(1) == b"?", "who is connected stays"


def test_a_revoked_client_does_not_resume(port: Any, made: Authority, tmp_path: Path) -> None:
    bad = made.pair("bad")
    crl = made.revocation_list(tmp_path / "crl.pem")
    opened = port(made.pair("server"), client_ca=made.path, client_crl=crl)
    for version in ("TLSv1_2", "TLSv1_3"):
        context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
        context.load_cert_chain(*bad)
        made.revocation_list(crl)
        assert opened.reload() is None
        session = opened.client(context=context).session
        assert opened.client(context=context, session=session).session_reused
        made.revocation_list(crl, bad[0])
        assert opened.reload() is None
        with pytest.raises(REFUSED):
            opened.client(context=context, session=session)


def test_an_expired_list_refuses_clients_with_certificates(
    port: Any, made: Authority, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    crl = made.revocation_list(tmp_path / "crl.pem", days=-1)
    opened = port(made.pair("server"), client_ca=made.path, client_crl=crl)
    assert [line for line in caplog.messages if "clients with a certificate are rejected" in line]
    opened.client()
    with pytest.raises(REFUSED):
        opened.client(pair=made.pair("client"))
    made.revocation_list(crl)
    assert opened.reload() is None
    opened.client(pair=made.pair("client"))
    made.revocation_list(crl, days=-1)
    assert opened.reload() == f"the revocation list {crl} has expired; the one in use is valid"
    opened.client(pair=made.pair("client"))
    clock.now += 40 * DAY
    before = opened.tls.context
    opened.tls.check_expiry()
    assert opened.tls.context is not before, "no session goes on"
    opened.tls.check_expiry()
    assert len([line for line in caplog.messages if "clients with a certificate are rejected" in line]) == 2


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_an_expired_client_does_not_resume(
    port: Any, made: Authority, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = port(made.pair("server"), client_ca=made.path)
    context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    context.load_cert_chain(*made.pair("brief", not_after=datetime.now(UTC) + DAY))
    session = opened.client(context=context).session
    assert opened.client(context=context, session=session).session_reused
    monkeypatch.setattr(tls_module, "time", lambda: time() + 2 * DAY.total_seconds())
    with pytest.raises(REFUSED):
        opened.client(context=context, session=session)
    assert opened.listener.handshake_counts["handshake_failures"] == {"client certificate: certificate has expired": 1}


def test_an_authority_without_a_list_is_logged(
    port: Any, made: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    crl = Authority(tmp_path / "other").revocation_list(tmp_path / "crl.pem")
    opened = port(made.pair("server"), client_ca=made.path, client_crl=crl)
    assert [line for line in caplog.messages if "has no list of" in line]
    with pytest.raises(REFUSED):
        opened.client(pair=made.pair("client"))


def test_a_removed_authority_is_not_trusted(port: Any, made: Authority, tmp_path: Path) -> None:
    """A trust store only grows, so there has to be a new one (mosquitto PR #3568)."""
    (tmp_path / "new").mkdir()
    new, ca = Authority(tmp_path / "new"), tmp_path / "authorities.pem"
    ca.write_bytes(made.path.read_bytes())
    opened = port(made.pair("server"), client_ca=ca)
    kept = opened.client(pair=made.pair("old"))
    ca.write_bytes(made.path.read_bytes() + new.path.read_bytes())
    assert opened.reload() is None
    opened.client(pair=made.pair("old"))
    opened.client(pair=new.pair("new"))
    ca.write_bytes(new.path.read_bytes())
    assert opened.reload() is None
    opened.client(pair=new.pair("new"))
    with pytest.raises(REFUSED):
        opened.client(pair=made.pair("old"))
    opened.accepted[0].send(b"?")
    assert kept.recv(1) == b"?"


# ---- read again


def test_new_certificates(port: Any, made: Authority, tmp_path: Path) -> None:
    default, site = [(tmp_path / f"{name}.pem", tmp_path / f"{name}.key") for name in ("default", "site")]
    for number in range(4):
        copy(made.pair(f"default{number}", "a.example"), default)
        copy(made.pair(f"site{number}", f"{number}.example"), site)
        if number == 0:
            opened = port(default, site)
        assert opened.reload() is None
        assert opened.shown("a.example") == der(default[0])
        assert opened.shown(f"{number}.example") == der(site[0])
        assert opened.shown(f"{number - 1}.example") == der(default[0])
    assert opened.tls.snapshot()["reloads"] == 4
    for transport, client in zip(opened.accepted, opened.clients, strict=True):
        transport.send(b"?")
        assert client.recv(1) == b"?"


def test_another_kind_of_key_leaves_nothing_of_the_old(port: Any, made: Authority, tmp_path: Path) -> None:
    pair = tmp_path / "cert.pem", tmp_path / "key.pem"
    copy(made.pair("rsa", key_type=trustme.KeyType.RSA), pair)
    opened = port(pair)
    copy(made.pair("ec"), pair)
    assert opened.reload() is None
    assert opened.shown() == der(pair[0])
    with pytest.raises((ssl.SSLError, ConnectionError)):
        opened.client(version="TLSv1_2", ciphers="ECDHE-RSA-AES128-GCM-SHA256")


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_sessions_go_on_behind_a_new_certificate(port: Any, made: Authority, tmp_path: Path, version: str) -> None:
    pair = tmp_path / "cert.pem", tmp_path / "key.pem"
    copy(made.pair("one"), pair)
    opened = port(pair)
    context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    session = opened.client(context=context).session
    assert opened.client(context=context, session=session).session_reused
    copy(made.pair("two"), pair)
    assert opened.reload() is None
    assert opened.client(context=context, session=session).session_reused
    assert opened.shown() == der(pair[0])


def test_the_keys_of_tickets_change_each_day(port: Any, made: Authority, clock: Clock) -> None:
    site = made.pair("b", "b.example")
    opened = port(made.pair("a", "a.example"), site)
    context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    session = opened.client(context=context).session
    for hours, resumes in ((23, True), (2, False)):
        clock.now += timedelta(hours=hours)
        opened.tls.check_expiry()
        opened.listener.renew(opened.tls.context)
        assert opened.client(context=context, session=session).session_reused is resumes
    assert opened.shown("b.example") == der(site[0])


HALF_A_LIST = b"-----BEGIN X509 CRL-----\nMIIB\n-----END X509 CRL-----\n"


def broken_files(made: Authority, tmp_path: Path) -> dict[str, tuple[str, bytes, str]]:
    """What is broken: the file, its new content, and what is said."""
    other = made.pair("other")
    expired = made.pair("expired", not_before=datetime.now(UTC) - 9 * DAY, not_after=datetime.now(UTC) - 2 * DAY)
    early = made.pair("early", not_before=datetime.now(UTC) + 9 * DAY)
    half = made.pair("half")[0].read_bytes()
    return {
        "half a file": ("cert", half[: len(half) // 3], "are not a certificate and its key"),
        "empty": ("cert", b"", "are not a certificate and its key"),
        "another key": ("key", other[1].read_bytes(), "are not a certificate and its key"),
        "no key": ("key", b"nonsense", "are not a certificate and its key"),
        "expired": ("both", b"".join(path.read_bytes() for path in expired), "expired at"),
        "not yet valid": ("both", b"".join(path.read_bytes() for path in early), "is not valid before"),
        "authorities": ("ca", b"nonsense", "cannot read the client authorities"),
        "list": ("crl", b"nonsense", "there is no revocation list"),
        "half a list": (
            "crl",
            b"-----BEGIN X509 CRL-----\nMIIB\n-----END X509 CRL-----\n",
            "cannot read the revocation",
        ),
    }


def test_broken_files_keep_the_old(port: Any, made: Authority, tmp_path: Path) -> None:
    good = made.pair("good")
    texts = {
        "cert": good[0].read_bytes(), "key": good[1].read_bytes(), "ca": made.path.read_bytes(),
        "crl": made.revocation_list(tmp_path / "list").read_bytes(),
    }  # fmt: skip
    paths = {name: tmp_path / name for name in texts}

    def write(**changed: bytes) -> None:
        for name, text in (texts | changed).items():
            paths[name].write_bytes(text)

    write()
    opened = port((paths["cert"], paths["key"]), client_ca=paths["ca"], client_crl=paths["crl"], what="listener.main")
    client = made.pair("client")
    for what, (name, text, says) in broken_files(made, tmp_path).items():
        write(**({"cert": text, "key": text} if name == "both" else {name: text}))
        fault = opened.reload()
        assert says in str(fault), what
        assert "\n" not in fault
        assert fault.startswith("listener.main: ") or "the one in use is valid" in fault
        assert opened.tls.snapshot()["fault"] == fault
        assert opened.shown(pair=client) == der(good[0]), what
    for path in paths.values():
        path.unlink()
        assert "No such file" in str(opened.reload())
        write()
    assert opened.reload() is None
    assert opened.tls.snapshot()["fault"] is None
    assert opened.shown(pair=client) == der(good[0])


def test_without_file_descriptors_the_old_stay(port: Any, made: Authority, tmp_path: Path) -> None:
    """CVE-2017-7652 of mosquitto: with no descriptor left a reload gave the defaults."""
    pair = tmp_path / "cert.pem", tmp_path / "key.pem"
    copy(made.pair("one"), pair)
    opened = port(pair, client_ca=made.path, client_certificate="required")
    client = made.pair("client")
    before = opened.shown(pair=client)
    copy(made.pair("two"), pair)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)
    faults = []
    try:
        for left in range(4):  # so that it fails at another step each time
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare + left, hard))
            faults.append(opened.reload())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert faults[0]
    assert "Too many open files" in faults[0]
    if all(faults):
        assert opened.shown(pair=client) == before
    with pytest.raises(REFUSED):
        opened.client()
    assert opened.reload() is None
    assert opened.shown(pair=client) == der(pair[0])
    with pytest.raises(REFUSED):
        opened.client()


# ---- what is told


def test_one_sentence_at_the_start(made: Authority, tmp_path: Path) -> None:
    cert, key = map(str, made.pair("server"))
    nothing = str(tmp_path / "nothing.pem")
    cases = [
        (TlsFiles(((cert, nothing),), what="listener.main"), f"listener.main: cannot read {nothing}: No such file"),
        (TlsFiles(((cert, key), (cert, cert))), f"{cert} and {cert} are not a certificate and its key"),
        (TlsFiles(((cert, key),), client_crl=nothing), "client_crl needs client_ca"),
        (TlsFiles(((cert, key),), client_certificate="required"), "client_certificate needs client_ca"),
        (TlsFiles(((cert, key),), client_ca=key), "cannot read the client authorities"),
    ]
    for files, says in cases:
        with pytest.raises(StartError) as raised:
            ListenerTls(files)
        assert says in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_private_key_with_a_password(made: Authority, tmp_path: Path) -> None:
    cert, key = made.pair("server")
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    protection = serialization.BestAvailableEncryption("tür".encode())
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    protected = tmp_path / "protected.key"
    protected.write_bytes(private.private_bytes(pem, pkcs8, protection))
    files = TlsFiles(((str(cert), str(protected)),), key_password="tür")
    assert ListenerTls(files).fault is None
    assert "tür" not in repr(files)
    cases = ((None, "set its password as tls.key_password"), ("other", "tls.key_password is wrong"))
    for password, says in cases:
        with pytest.raises(StartError, match=says):
            ListenerTls(replace(files, key_password=password))
    ListenerTls(TlsFiles(((str(cert), str(key)),), key_password="of another listener"))


def test_expiry_is_logged_in_advance(made: Authority, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    begins = clock.now - DAY
    cert, key = made.pair("ends", not_before=begins, not_after=begins + 91 * DAY)
    tls = ListenerTls(TlsFiles(((str(cert), str(key)),), what="listener.main"), clock)
    told = []
    for day in range(95):
        before = len(caplog.messages)
        tls.check_expiry()
        tls.check_expiry()
        told += [(day, line.partition(f"{cert} ")[2].partition(" at")[0]) for line in caplog.messages[before:]]
        clock.now += DAY
    assert told == [
        (60, "expires within 30 days,"), (83, "expires within 7 days,"), (89, "expires within a day,"),
        (90, "expired"),
    ]  # fmt: skip


def test_a_weekly_certificate_is_logged_on_its_last_day(
    made: Authority, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = made.pair("week", not_before=clock.now - DAY, not_after=clock.now + 5 * DAY)
    tls = ListenerTls(TlsFiles(((str(cert), str(key)),)), clock)
    assert caplog.messages == []
    clock.now += 4.5 * DAY
    tls.check_expiry()
    assert len(caplog.messages) == 1


def test_a_world_readable_key_is_logged(port: Any, made: Authority, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = made.pair("open")
    port((cert, key))
    assert caplog.messages == []
    key.chmod(0o644)
    port((cert, key))
    assert f"every user of this machine can read the private key {key}" in caplog.text


def test_an_expired_certificate_is_logged_at_start(
    port: Any, made: Authority, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    pair = made.pair("gone", not_before=clock.now - 9 * DAY, not_after=clock.now - DAY)
    opened = port(pair)
    assert [line for line in caplog.messages if "expired at" in line]
    assert opened.shown() == der(pair[0]), "clients say what they think of it"
    facts = opened.tls.snapshot()["certificates"][0]
    assert facts["not_after_s"] == pytest.approx((clock.now - DAY).timestamp(), abs=1)
    assert facts["key"] == "EC"
