"""Trust in a peer: expired, foreign, self-signed, wrong names, wrong purpose."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from smqrt.errors import ArgumentError
from smqrt.transport.tls_contexts import CertStore, ClientTls, Identity, ServerTls, Trust, self_signed_pair
from tests.support.pki import client_of, expired, identity_of, server_of, store_of

HOUR_S = 3600


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def der(leaf: trustme.LeafCert) -> list[bytes]:
    return [ssl.PEM_cert_to_DER_cert(blob.bytes().decode()) for blob in leaf.cert_chain_pems]


@pytest.mark.parametrize(
    ("names", "asked", "trust"),
    [
        (["a.example"], "a.example", Trust.TRUSTED),
        (["a.example"], "A.Example.", Trust.TRUSTED),
        (["a.example"], "b.example", Trust.CERT),
        (["*.a.example"], "x.a.example", Trust.TRUSTED),
        (["*.a.example"], "x.y.a.example", Trust.CERT),
        (["*.a.example"], "a.example", Trust.CERT),
        (["*.example"], "a.example", Trust.CERT),
        (["bücher.example"], "bücher.example", Trust.TRUSTED),
        (["127.0.0.1"], "127.0.0.1", Trust.TRUSTED),
        (["::1"], "::1", Trust.TRUSTED),
        (["127.0.0.1"], "127.0.0.2", Trust.CERT),
        (["localhost"], "127.0.0.1", Trust.CERT),
    ],
)
def test_the_name_has_to_match(ca: trustme.CA, names: list[str], asked: str, trust: Trust) -> None:
    assert store_of(ca).judge(der(ca.issue_cert(*names)), asked) is trust


def test_common_name_counts_without_alternative_names(ca: trustme.CA) -> None:
    leaf = der(ca.issue_cert(common_name="old.device"))
    assert store_of(ca).judge(leaf, "old.device") is Trust.TRUSTED
    named = der(ca.issue_cert("new.device", common_name="old.device"))
    assert store_of(ca).judge(named, "old.device") is Trust.CERT


def test_foreign_authority(ca: trustme.CA) -> None:
    leaf = der(trustme.CA().issue_cert("a.example"))
    assert store_of(ca).judge(leaf, "a.example") is Trust.CN
    assert store_of(ca).judge(leaf, "b.example") is Trust.NONE
    assert CertStore.system().judge(leaf, "a.example") is Trust.CN


def test_expired(ca: trustme.CA) -> None:
    leaf = der(expired(ca, "a.example"))
    assert store_of(ca).judge(leaf, "a.example") is Trust.CERTCN
    assert store_of(ca).judge(leaf, "b.example") is Trust.NONE
    assert store_of(trustme.CA()).judge(leaf, "a.example") is Trust.CN


def test_a_client_certificate_is_not_valid_for_a_server() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "device")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), 7, now - timedelta(days=1), now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("a.example")]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    )
    chain = [builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)]
    store = CertStore()
    store.add(chain[0])
    assert store.judge(chain, "a.example") is Trust.CN


def test_an_intermediate_that_is_presented(ca: trustme.CA) -> None:
    chain = der(ca.create_child_ca().issue_cert("a.example"))
    assert len(chain) == 2
    assert store_of(ca).judge(chain, "a.example") is Trust.TRUSTED
    assert store_of(ca).judge(chain[:1], "a.example") is Trust.CN


def test_self_signed(tmp_path: Path) -> None:
    cert, _ = self_signed_pair("127.0.0.1", tmp_path)
    pem = Path(cert).read_bytes()
    chain = [ssl.PEM_cert_to_DER_cert(pem.decode())]
    store = CertStore()
    assert store.judge(chain, "localhost") is Trust.CN
    assert store.add(pem) == 1
    assert store.judge(chain, "localhost") is Trust.TRUSTED


def test_a_single_certificate_can_be_trusted_without_its_authority(ca: trustme.CA) -> None:
    leaf = ca.issue_cert("a.example")
    store = CertStore()
    store.add(der(leaf)[0])
    assert store.judge(der(leaf), "a.example") is Trust.TRUSTED
    assert store.judge(der(ca.issue_cert("a.example")), "a.example") is Trust.CN


def test_a_leaf_is_no_authority(ca: trustme.CA) -> None:
    forged = der(trustme.CA().issue_cert("a.example"))
    chain = [*forged, *der(ca.issue_cert("a.example"))]
    assert store_of(ca).judge(chain, "a.example") is Trust.CN


def test_no_certificate_and_invalid_certificate(ca: trustme.CA) -> None:
    assert store_of(ca).judge([], "a.example") is Trust.NONE
    assert store_of(ca).judge([b"rubbish"], "a.example") is Trust.NONE
    with pytest.raises(ArgumentError, match="not a certificate: "):
        CertStore().add(b"rubbish")


def test_the_key_belongs_to_the_certificate(ca: trustme.CA) -> None:
    one, other = ca.issue_cert("a.example"), ca.issue_cert("a.example")
    with pytest.raises(ArgumentError, match="that match"):
        Identity(one.cert_chain_pems[0].bytes(), other.private_key_pem.bytes())
    assert "PRIVATE" not in repr(identity_of(one))


# ---- both contexts, over memory


def shake(client: ClientTls, server: ServerTls, alpn: tuple[str, ...] = ()) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """A handshake over memory: (client's end, server's end)."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.context(alpn).wrap_bio(down, up, server_hostname="a.example")
    theirs = server.context(("mqtt", "http/1.1")).wrap_bio(up, down, server_side=True)
    for _ in range(3):
        for end in (ours, theirs):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return ours, theirs


def test_alpn(ca: trustme.CA) -> None:
    client, server = client_of(ca), server_of(ca.issue_cert("a.example"))
    assert shake(client, server, ("x", "mqtt"))[0].selected_alpn_protocol() == "mqtt"
    assert shake(client, server)[0].selected_alpn_protocol() is None


def test_client_certificates(ca: trustme.CA) -> None:
    devices = trustme.CA()
    client, server = client_of(ca), server_of(ca.issue_cert("a.example"), devices)
    assert shake(client, server)[1].getpeercert() is None
    client.add_identity(identity_of(devices.issue_cert("device-1")))
    assert shake(client, server)[1].getpeercert() is not None


def test_a_foreign_client_certificate_is_refused(ca: trustme.CA) -> None:
    client, server = client_of(ca), server_of(ca.issue_cert("a.example"), trustme.CA())
    client.add_identity(identity_of(ca.issue_cert("device-1")))
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shake(client, server)
