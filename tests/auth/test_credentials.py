"""JSON Web Tokens as logins: which let somebody in, and the hostile ones that do not."""

from __future__ import annotations

import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from gevent.pywsgi import WSGIServer
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from smqrt.auth import credentials
from smqrt.auth.identity import Method
from smqrt.errors import StartError
from smqrt.wire import smq as wire
from tests.auth.conftest import Guarded
from tests.support.device import RAW_HEADERS, Device, connect_packet
from tests.support.sites import patience
from tests.support.waiting import wait_until

__all__ = ["patience"]

RSA_KEY = rsa.generate_private_key(65537, 2048)
OTHER_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
DAY_S = 86_400  # the tokens below are made when the tests are collected, maybe many minutes before they run
SECRET = "a secret of more than thirty-two bytes"
RULES = "allow @operators * #\nallow * read users/%u"


def pem(key: Any) -> bytes:
    return bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def token(key: Any = RSA_KEY, algorithm: str = "RS256", header: dict[str, Any] | None = None, **claims: Any) -> str:
    said = {"sub": "ann", "exp": time.time() + DAY_S, "iss": "us", "aud": "hub", "groups": ["operators"]} | claims
    return jwt.encode({k: v for k, v in said.items() if v is not None}, key, algorithm, header)


def part(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def knocks(guarded: Guarded, shown: str, uid: bytes = b"device") -> Device:
    """A client that shows a token in the head of its request."""
    device = guarded.site.open().start(f"{RAW_HEADERS}Authorization: Bearer {shown}\r\n")
    return device.send(connect_packet(uid))


def refusal(guarded: Guarded, shown: str) -> str:
    packet = knocks(guarded, shown).until_end()[0]
    assert (packet[0], packet[1]) == (wire.Type.CONNACK, 3)
    return packet[6:].decode()


@pytest.fixture
def guarded(guard: Callable[..., Guarded], tmp_path: Path) -> Guarded:
    """Takes tokens of three keys and a secret."""
    (tmp_path / "keys.pem").write_bytes(pem(RSA_KEY) + pem(EC_KEY) + pem(ED_KEY))
    (tmp_path / "secret").write_text(SECRET + "\n")
    (tmp_path / "secret").chmod(0o600)
    files = {"jwt_key": str(tmp_path / "keys.pem"), "jwt_secret": str(tmp_path / "secret")}
    return guard(RULES, auth=files | {"jwt_issuer": "us", "jwt_audience": "hub"})


def test_tokens_authenticate(guarded: Guarded) -> None:
    for key, algorithm in (
        (RSA_KEY, "RS256"),
        (RSA_KEY, "PS256"),
        (EC_KEY, "ES256"),
        (ED_KEY, "EdDSA"),
        (SECRET, "HS256"),
    ):
        device = knocks(guarded, token(key, algorithm, {"kid": "unknown"})).accepted()
        identity = next(iter(guarded.site.state.clients())).identity
        assert (identity.user, identity.groups, identity.method) == ("ann", ("operators",), Method.TOKEN)
        device.subscribe(b"anything")
        device.disconnect()
    in_connect = token(SECRET, "HS256", exp=int(time.time()) + 60)
    assert len(in_connect) < 256
    guarded.site.open().start().connect(b"device", credentials=in_connect.encode()).subscribe(b"users/ann")


def _confused() -> str:
    """Signed with the public key as if that were a shared secret."""
    head, body = part({"alg": "HS256", "typ": "JWT"}), part({"sub": "ann", "exp": 1e10, "iss": "us", "aud": "hub"})
    import hmac

    mac = hmac.digest(pem(RSA_KEY), f"{head}.{body}".encode(), "sha256")
    return f"{head}.{body}.{part(mac)}"


OWN = json.loads(RSAAlgorithm.to_jwk(OTHER_KEY.public_key()))
CLAIMS = {"sub": "ann", "exp": 10**10, "iss": "us", "aud": "hub"}
GOOD = token()
DEEP = part(b'{"alg":' * 1500)
HOSTILE = {
    "none": (f"{part({'alg': 'none'})}.{part(CLAIMS)}.", "unknown key, or an algorithm other than"),
    "None": (f"{part({'alg': 'NonE'})}.{part(CLAIMS)}.", "unknown key, or an algorithm other than"),
    "no algorithm": (f"{part({})}.{part(CLAIMS)}.x", "it is malformed"),
    "a list of algorithms": (f"{part({'alg': ['RS256']})}.{part(CLAIMS)}.x", "it is malformed"),
    "confusion": (_confused(), "its signature is wrong"),
    "another's key": (token(OTHER_KEY), "its signature is wrong"),
    "its own key": (token(OTHER_KEY, header={"jwk": OWN}), "its signature is wrong"),
    "an algorithm not allowed": (token(RSA_KEY, "RS512"), "an algorithm other than RS256, PS256"),
    "cut": (GOOD.rpartition(".")[0] + ".", "its signature is wrong"),
    "changed": (GOOD.split(".")[0] + "." + part(CLAIMS) + "." + GOOD.split(".")[2], "its signature is wrong"),
    "expired": (token(exp=time.time() - 60), "it has expired"),
    "not yet": (token(nbf=time.time() + DAY_S), "not yet valid"),
    "for ever": (token(exp=None), 'missing the "exp" claim'),
    "infinite": (token(exp=float("inf")), "(exp) must be an integer"),
    "a huge number": (token(exp=10**400), "it is malformed"),
    "of others": (token(iss="them"), "Invalid issuer"),
    "for others": (token(aud="them"), "Audience"),
    "for nobody": (token(aud=None), "aud"),
    "no user": (token(sub=None), "the claim sub, which names the user, is not a string"),
    "a number": (token(jti=5), "JWT ID must be a string"),
    "a wildcard": (token(sub="#"), "the user name must not have + # or /"),
    "a path": (token(sub="../ann"), "the user name must not have + # or /"),
    "anonymous": (token(sub="anonymous"), "must not be anonymous"),
    "huge": ("eyJ" + "a" * 9000 + ".e30.x", "it is malformed"),
    "deep": (f"{part(b'[' * 5000)}.e30.x", "it is malformed"),
    "deep header": (f"{DEEP}.e30.x", "it is malformed"),
    "kid": (token(OTHER_KEY, header={"kid": "../../../dev/null"}), "its signature is wrong"),
    "kid of SQL": (token(OTHER_KEY, header={"kid": "' OR 1=1 --"}), "its signature is wrong"),
    "critical": (token(header={"crit": ["x"], "x": 1}), "it is malformed"),
    "an encrypted one": (f"{part({'alg': 'RSA-OAEP', 'enc': 'A256GCM'})}.a.b", "it is malformed"),
    "no token": ("abc", "it is malformed"),
    "dots": ("....", "it is malformed"),
    "no text": ("eyJ\x80.e.e", "it is malformed"),
}  # fmt: skip


def test_hostile_tokens_are_rejected(guarded: Guarded) -> None:
    began_s = time.monotonic()
    wrong = {name: said for name, (shown, says) in HOSTILE.items() if says not in (said := refusal(guarded, shown))}
    assert wrong == {}
    assert not list(guarded.site.state.clients())
    assert time.monotonic() - began_s < 5
    knocks(guarded, GOOD).accepted()


def test_a_token_that_expires_ends_its_connection(guarded: Guarded) -> None:
    guarded.service.settings.__dict__["jwt_leeway_s"] = 0.0
    device = knocks(guarded, token(exp=time.time() + 2)).accepted()
    device.subscribe(b"x")
    device.expect_end(wire.disconnect(b"the login has expired"))


def test_removing_a_key_ends_its_tokens(guarded: Guarded, tmp_path: Path) -> None:
    ann = knocks(guarded, GOOD).accepted()
    bob = guarded.site.open().start(f"{RAW_HEADERS}Authorization: Bearer {token(EC_KEY, 'ES256', sub='bob')}\r\n")
    bob.connect(b"another")
    (tmp_path / "keys.pem").write_bytes(pem(EC_KEY))
    assert guarded.service.reload() is None
    ann.expect_end(wire.disconnect(b"the key of the token was revoked"))
    bob.expect_nothing()
    (tmp_path / "keys.pem").write_bytes(b"nothing")
    assert "it has no public key" in (guarded.service.reload() or "")
    bob.expect_nothing()


class Issuer:
    """Serves a JWKS on loopback, and counts who asks for it."""

    def __init__(self) -> None:
        self.asked, self.status = 0, "200 OK"
        self.body: bytes = b""
        self.server = WSGIServer(("127.0.0.1", 0), self._answer, log=None)
        self.server.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/keys"

    def _answer(self, environ: dict[str, Any], start: Any) -> list[bytes]:
        self.asked += 1
        start(self.status, [("Content-Type", "application/json"), ("Location", "http://127.0.0.1:1/")])
        return [self.body]

    def has(self, **keys: dict[str, Any]) -> None:
        self.body = json.dumps({"keys": [{**fields, "kid": name} for name, fields in keys.items()]}).encode()


def jwk(key: Any) -> dict[str, Any]:
    kind = {rsa.RSAPrivateKey: RSAAlgorithm, ec.EllipticCurvePrivateKey: ECAlgorithm}
    maker: Any = next((made for of, made in kind.items() if isinstance(key, of)), OKPAlgorithm)
    return dict(json.loads(maker.to_jwk(key.public_key())))


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    yield made
    made.server.stop()


def test_keys_of_an_address(guard: Callable[..., Guarded], issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"kty": "oct", "k": part(SECRET.encode())}
    issuer.has(
        one=jwk(RSA_KEY), curve=jwk(EC_KEY), secret=shared, odd={"kty": "odd"}, cipher=jwk(OTHER_KEY) | {"use": "enc"}
    )
    guarded = guard(RULES, auth={"jwt_jwks": issuer.url, "jwt_issuer": "us"})
    wait_until(lambda: issuer.asked == 1, "the keys are fetched in the background")
    knocks(guarded, token(header={"kid": "one"})).accepted()
    knocks(guarded, token(EC_KEY, "ES256", {"kid": "curve"}, sub="bob"), b"bob-one").accepted()
    assert "its signature is wrong" in refusal(
        guarded, token(EC_KEY, "ES256").rpartition(".")[0] + "." + part(b"x" * 64)
    )
    assert "unknown key, or an algorithm other than" in refusal(guarded, token(SECRET, "HS256", {"kid": "secret"}))
    for _ in range(5):
        assert "unknown key, or an algorithm other than" in refusal(guarded, token(OTHER_KEY, header={"kid": "two"}))
    assert issuer.asked == 1, "an unknown key is asked for once a minute"

    monkeypatch.setattr(credentials, "RETRY_S", 0.0)
    issuer.has(one=jwk(RSA_KEY), two=jwk(OTHER_KEY))
    knocks(guarded, token(OTHER_KEY, header={"kid": "two"})).accepted()
    for status, body in (
        ("500 Oh", b"{}"),
        ("302 There", b""),
        ("200 OK", b"{" * 5000),
        ("200 OK", b"x" * (300 << 10)),
    ):
        issuer.status, issuer.body = status, body
        assert "unknown key, or an algorithm other than" in refusal(guarded, token(header={"kid": "three"}))
        knocks(guarded, token(header={"kid": "one"})).accepted()
    assert guarded.service._keys.fault


@pytest.mark.parametrize(
    ("auth", "sentence"),
    [
        ({"jwt_jwks": "http://example.com/keys", "jwt_issuer": "us"}, "auth.jwt_jwks must be an https URL, not"),
        ({"jwt_jwks": "https://example.com/keys"}, "auth.jwt_jwks needs auth.jwt_issuer or auth.jwt_audience"),
        ({"jwt_key": "short", "jwt_algorithms": ("none",)}, "auth.jwt_algorithms: 'none' is not one of RS256"),
        ({"jwt_secret": "short"}, "the secret needs at least 32 bytes"),
        ({"jwt_key": "private"}, "it has a private key; use the public key to verify tokens"),
        ({"jwt_key": "weak"}, "an RSA key must have 2048 to 8192 bits, not 1024"),
    ],
)
def test_insecure_settings_are_rejected(
    guard: Callable[..., Guarded], tmp_path: Path, auth: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "short").write_text("too short")
    (tmp_path / "short").chmod(0o600)
    (tmp_path / "weak").write_bytes(pem(rsa.generate_private_key(65537, 1024)))
    encoding, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "private").write_bytes(RSA_KEY.private_bytes(encoding, private, serialization.NoEncryption()))
    files = {k: str(tmp_path / v) if k in ("jwt_key", "jwt_secret") else v for k, v in auth.items()}
    with pytest.raises(StartError, match=sentence):
        guard(RULES, auth=files)
