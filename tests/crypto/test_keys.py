"""RSA and elliptic curve keys, signatures, and certificates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from smqrt.crypto import keys
from smqrt.crypto.keys import MAX_NAMES, MAX_PEM_BYTES, PrivateKey, certificate, generate, load, request, requested_uses
from smqrt.errors import ArgumentError, CryptoError

NAME = {"commonname": "device"}


@pytest.fixture(scope="module")
def ecc() -> PrivateKey:
    return keys.private(generate())


@pytest.fixture(scope="module")
def rsa_key() -> PrivateKey:
    return keys.private(generate("rsa", 1024))


@pytest.fixture(params=["ecc", "rsa"])
def key(request: pytest.FixtureRequest, ecc: PrivateKey, rsa_key: PrivateKey) -> PrivateKey:
    return ecc if request.param == "ecc" else rsa_key


def refused(error: pytest.ExceptionInfo[CryptoError]) -> bool:
    return error.value.word == "sslcryptoerr"


# ---- keys


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("rsa", 1023), "1024 to 8192 bits expected, not 1023"),
        (("rsa", 8193), "1024 to 8192 bits expected, not 8193"),
        (("dsa",), "unknown kind 'dsa': use ecc or rsa"),
        (("ecc", 0, "SECP256K1"), "unknown curve 'SECP256K1'"),
    ],
)
def test_unknown_kinds_of_keys_are_named(arguments: tuple[str], fault: str) -> None:
    with pytest.raises(ArgumentError, match=fault):
        generate(*arguments)


@pytest.mark.parametrize("curve", keys.CURVES)
def test_numbers_give_the_same_public_key(curve: str) -> None:
    key = load(generate(curve=curve.lower()))
    x, y = keys.parameters(key)
    assert len(x) == len(y) == keys.key_size_bytes(key)
    assert keys.curve_key(bytes(3) + x, y) == keys.public(key)
    with pytest.raises(CryptoError, match="the point is not on any of the curves"):
        keys.curve_key(x, x)


def test_rsa_numbers_give_the_same_public_key(rsa_key: PrivateKey) -> None:
    n, e = keys.parameters(rsa_key)
    assert (len(n), e) == (128, b"\1\0\1")
    assert keys.rsa_key(n, e) == keys.public(rsa_key)
    for wrong in ((bytes(2049), e), (n, bytes(9)), (n, b""), (b"\x10", e)):
        with pytest.raises(CryptoError) as fault:
            keys.rsa_key(*wrong)
        assert refused(fault)


def test_what_is_no_usable_key_is_refused(ecc: PrivateKey) -> None:
    other = ed25519.Ed25519PrivateKey.generate()
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    with_password = ecc.private_bytes(encoding, form, serialization.BestAvailableEncryption(b"x"))
    for pem in (
        b"",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        with_password,
        other.private_bytes(encoding, form, serialization.NoEncryption()),
        other.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo),
        keys.pem_of(ecc) + bytes(MAX_PEM_BYTES),
    ):
        with pytest.raises(CryptoError) as fault:
            load(pem)
        assert refused(fault)


def test_a_private_key_is_needed_to_sign(ecc: PrivateKey) -> None:
    public = ecc.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert load(public) == keys.public(ecc)
    with pytest.raises(CryptoError, match="a private key is needed"):
        keys.private(public)


# ---- signatures


@pytest.mark.parametrize("padding", ["pkcs1", "pss"])
def test_a_signature_is_of_its_data_and_key(key: PrivateKey, padding: str) -> None:
    public = keys.public(key)
    signature = keys.sign(b"data", key, padding_name=padding)
    assert keys.verify(b"data", signature, public, padding_name=padding)
    assert keys.is_signature(signature, public)
    assert not keys.verify(b"Data", signature, public, padding_name=padding)
    damaged = signature[:-1] + bytes((signature[-1] ^ 1,))
    assert not keys.verify(b"data", damaged, public, padding_name=padding)
    assert not keys.verify(b"data", b"", public, padding_name=padding)
    assert not keys.is_signature(b"", public)


def test_data_with_the_size_of_a_digest_is_one(ecc: PrivateKey) -> None:
    digest = hashes.Hash(hashes.SHA384())
    digest.update(b"data")
    assert keys.verify(digest.finalize(), keys.sign(b"data", ecc, "SHA-384"), keys.public(ecc))


def test_unknown_paddings_are_named(rsa_key: PrivateKey) -> None:
    public = keys.public(rsa_key)
    for call in (
        lambda: keys.sign(b"", rsa_key, padding_name="none"),
        lambda: keys.verify(b"", b"", public, padding_name="none"),
        lambda: keys.encrypt(b"", public, "none"),
        lambda: keys.decrypt(b"", rsa_key, "none"),
    ):
        with pytest.raises(ArgumentError, match="unknown padding 'none'"):
            call()


def test_a_key_may_be_too_short_for_a_digest(rsa_key: PrivateKey) -> None:
    with pytest.raises(CryptoError) as fault:
        keys.sign(b"", rsa_key, "sha512", "pss")  # 64 + 64 + 2 bytes of 128
    assert refused(fault)


def test_numbers_of_a_signature_are_a_signature(ecc: PrivateKey) -> None:
    signature = keys.sign(b"data", ecc)
    r, s = keys.signature_parameters(signature)
    assert len(r) == len(s) == 32
    assert keys.verify(b"data", r + s, keys.public(ecc))
    assert keys.is_signature(r + s, keys.public(ecc))
    assert not keys.verify(b"data", s + r, keys.public(ecc))
    for wrong in (b"", b"x" * 70, bytes.fromhex("30060201ff020101"), bytes.fromhex("30480243" + "01" * 67 + "020101")):
        with pytest.raises(CryptoError) as fault:
            keys.signature_parameters(wrong)
        assert refused(fault)


# ---- RSA encryption


@pytest.mark.parametrize("padding", ["pkcs1", "oaep"])
def test_rsa_decrypts_what_it_encrypted(rsa_key: PrivateKey, padding: str) -> None:
    sealed = keys.encrypt(b"data", keys.public(rsa_key), padding)
    assert keys.decrypt(sealed, rsa_key, padding) == b"data"
    with pytest.raises(CryptoError, match="128 bytes are too many for this key"):
        keys.encrypt(bytes(128), keys.public(rsa_key), padding)
    with pytest.raises(CryptoError) as fault:
        keys.decrypt(sealed[1:], rsa_key, padding)
    assert fault.value.word == "failed"


def test_curves_do_not_encrypt(ecc: PrivateKey) -> None:
    with pytest.raises(CryptoError, match="encryption needs an RSA key"):
        keys.encrypt(b"", keys.public(ecc))
    with pytest.raises(CryptoError, match="decryption needs an RSA key"):
        keys.decrypt(b"", ecc)


# ---- certificates


def test_words_of_a_request_are_sorted() -> None:
    found = requested_uses(["SSL_SERVER", " ", "device.example ", "KEY_AGREEMENT", "SSL_CA"])
    assert found.uses == ["SSL_SERVER", "SSL_CA"]
    assert found.key_uses == ["KEY_AGREEMENT"]
    assert found.names == ["device.example"]
    requested_uses(["x"] * MAX_NAMES)
    with pytest.raises(ArgumentError, match="csr: more than 100 names and uses"):
        requested_uses(["x"] * (MAX_NAMES + 1))


def issued(key: PrivateKey, words: list[str], **options: float) -> x509.Certificate:
    made = certificate(request(key, NAME, requested_uses(words)), key, **options)  # type: ignore[arg-type]
    return x509.load_pem_x509_certificate(made)


def test_a_certificate_has_what_was_requested(ecc: PrivateKey) -> None:
    words = ["DNS:device.example", "192.0.2.1", "me@device.example", "SSL_CLIENT", "ENCIPHER_ONLY", "EMAIL_CA"]
    found = issued(ecc, words).extensions
    names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one.value) for one in names] == ["device.example", "192.0.2.1", "me@device.example"]
    usage = found.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert usage.value.key_agreement, "without it the other has no meaning"
    assert usage.value.encipher_only
    assert found.get_extension_for_class(x509.BasicConstraints).value.ca
    assert list(found.get_extension_for_class(x509.ExtendedKeyUsage).value) == [keys.USES["SSL_CLIENT"]]


def test_times_have_defaults_that_browsers_accept(ecc: PrivateKey) -> None:
    found = issued(ecc, [])
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    assert timedelta(minutes=59) < datetime.now(UTC) - begin < timedelta(minutes=61)
    assert end - begin == timedelta(days=397)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"valid_from_s": 2e9, "valid_to_s": 2e9}, "the end of its validity must be after the start"),
        ({"valid_from_s": 1e300}, "the time is out of range"),
        ({"valid_from_s": -1e9}, "the time is before 1951"),
        ({"serial": 0}, "the serial number must be above 0"),
        ({"serial": 1 << 159}, "at most 159 bits"),
    ],
)
def test_impossible_certificates_are_refused(ecc: PrivateKey, options: dict[str, float], fault: str) -> None:
    with pytest.raises(ArgumentError, match=fault):
        issued(ecc, [], **options)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ({}, "the name has no parts; pass at least commonname"),
        ({"colour": "red"}, "unknown part of a name 'colour'"),
        ({"C": "Germany"}, "country cannot be 'Germany'"),
    ],
)
def test_impossible_names_are_refused(ecc: PrivateKey, name: dict[str, str], fault: str) -> None:
    with pytest.raises(ArgumentError, match=fault):
        request(ecc, name)


def test_an_issuer_and_its_key_belong_together(ecc: PrivateKey, rsa_key: PrivateKey) -> None:
    authority = certificate(request(rsa_key, {"cn": "authority"}, requested_uses(["SSL_CA"])), rsa_key)
    asked = request(ecc, {"CN": "device"})
    found = x509.load_pem_x509_certificate(certificate(asked, rsa_key, authority))
    issuer = x509.load_pem_x509_certificate(authority)
    found.verify_directly_issued_by(issuer)
    own = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    assert found.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier == own.digest
    with pytest.raises(CryptoError, match="the issuer's certificate and the key do not match"):
        certificate(asked, ecc, authority)
    with pytest.raises(CryptoError, match="key and request do not match; pass the issuer's certificate too"):
        certificate(asked, rsa_key)


def test_a_request_with_a_wrong_signature_is_refused(ecc: PrivateKey) -> None:
    der = bytearray(x509.load_pem_x509_csr(request(ecc, NAME)).public_bytes(serialization.Encoding.DER))
    der[der.index(b"device")] ^= 1
    wrong = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(CryptoError, match="the signature of the request is wrong"):
        certificate(wrong, ecc)
    with pytest.raises(CryptoError, match="not a certificate signing request"):
        certificate(b"x", ecc)


def test_wrong_numbers_of_a_private_key_are_refused(rsa_key: PrivateKey) -> None:
    assert isinstance(rsa_key, rsa.RSAPrivateKey)
    good = rsa_key.private_numbers()
    for wrong in ({"d": good.d + 2}, {"dmp1": good.dmp1 + 2}, {"iqmp": good.iqmp + 1}):
        values = {name: getattr(good, name) for name in ("p", "q", "d", "dmp1", "dmq1", "iqmp")} | wrong
        numbers = rsa.RSAPrivateNumbers(public_numbers=good.public_numbers, **values)
        pem = keys.pem_of(numbers.private_key(unsafe_skip_rsa_key_validation=True))
        with pytest.raises(CryptoError) as fault:
            load(pem)
        assert refused(fault)
