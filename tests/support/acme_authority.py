"""A certificate authority that speaks ACME (RFC 8555), for tests: it verifies names at the server, and signs requests.

It checks what it is sent: signatures, nonces, addresses and account of each request.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import secrets
import socket
import ssl
import threading
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

WAIT_S = 10.0
ACME_IDENTIFIER = x509.ObjectIdentifier("1.3.6.1.5.5.7.1.31")
Json = dict[str, Any]


def b64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def unb64(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Problem(Exception):
    """A refusal: the word of RFC 8555 §6.7, what is told, the status, and seconds to wait."""

    def __init__(self, word: str, detail: str, status: int = 400, retry_after: str = "") -> None:
        super().__init__(detail)
        self.word, self.detail, self.status, self.retry_after = word, detail, status, retry_after

    @property
    def body(self) -> Json:
        return {"type": f"urn:ietf:params:acme:error:{self.word}", "detail": self.detail, "status": self.status}


class AcmeAuthority:
    """Runs until it is closed.

    Attributes:
        url: of its directory.
        http_port, tls_port: where it looks for every name, at 127.0.0.1.
        offers: the kinds of challenges.
        refusals: problems by the kind of request ("newOrder", "newAccount", "finalize", "newNonce"), the first of a
            list for the next request.
        counts: requests by their kind, verified and failed challenges by theirs.
        lives, age: of the certificates.
        may_verify: challenges wait for it.
        binding: the identifier and the key of the only account of its company; None when it asks for none.
        contacts: of each account.
    """

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self.path = folder / "acme-root.pem"
        self._ca.cert_pem.write_to_path(str(self.path))
        self.http_port = self.tls_port = 0
        self.offers = ["http-01", "tls-alpn-01", "dns-01"]
        self.refusals: dict[str, list[Problem]] = {}
        self.counts: Counter[str] = Counter()
        self.lives, self.age = timedelta(days=90), timedelta(hours=1)
        self.may_verify = threading.Event()
        self.may_verify.set()
        self.texts: dict[str, list[str]] = {}
        self.contacts: dict[str, list[str]] = {}
        self.binding: tuple[str, bytes] | None = None
        self._accounts: dict[str, Json] = {}
        self._nonces: set[str] = set()
        self._orders: dict[str, Json] = {}
        self._authorizations: dict[str, Json] = {}
        self._chains: dict[str, str] = {}
        self._lock = threading.Lock()
        self._start(0)

    def _start(self, port: int) -> None:
        authority = self

        class Handler(_Handler):
            ca = authority

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"{self.base}/directory"

    def go_down(self) -> None:
        """Close its port."""
        self._server.shutdown()
        self._server.server_close()

    def come_back(self) -> None:
        self._start(self._port)

    def close(self) -> None:
        self.may_verify.set()
        self.go_down()

    def looks_at(self, http_port: int, tls_port: int) -> None:
        self.http_port, self.tls_port = http_port, tls_port

    def issued(self) -> int:
        return len(self._chains)

    # ---- requests

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Json | str, dict[str, str]]:
        kind, _, number = path.strip("/").partition("/")
        self.counts[kind] += 1
        if self.refusals.get(kind):
            raise self.refusals[kind].pop(0)
        if kind == "directory":
            names = ("newNonce", "newAccount", "newOrder", "revokeCert", "keyChange")
            meta = {"termsOfService": f"{self.base}/terms", "externalAccountRequired": self.binding is not None}
            return 200, {**{name: f"{self.base}/{name}" for name in names}, "meta": meta}, {}
        if kind == "newNonce":
            return (200 if method == "HEAD" else 204), "", {}
        if method != "POST":
            raise Problem("malformed", f"{method} {path}", 405)
        account, payload = self._opened(kind, self.base + path, json.loads(body))
        handle: Any = getattr(self, f"_{kind}", None)
        if handle is None:
            raise Problem("malformed", f"no {path}", 404)
        answered: tuple[int, Json | str, dict[str, str]] = handle(account, number, payload)
        return answered

    def nonce(self) -> str:
        made = b64(secrets.token_bytes(16))
        self._nonces.add(made)
        return made

    def _opened(self, kind: str, url: str, jws: Json) -> tuple[str, Json]:
        """Check the request as a whole; returns its account and its payload."""
        protected = json.loads(unb64(jws["protected"]))
        if protected["nonce"] not in self._nonces:
            raise Problem("badNonce", "unknown nonce")
        self._nonces.discard(protected["nonce"])
        if protected["url"] != url:
            raise Problem("unauthorized", f"signed for {protected['url']}, sent to {url}", 403)
        if kind == "newAccount":
            account, key = "", protected["jwk"]
        else:
            account = protected.get("kid", "")
            if account not in self._accounts:
                raise Problem("accountDoesNotExist", f"no account {account}")
            key = self._accounts[account]
        if protected["alg"] != "ES256" or key["crv"] != "P-256":
            raise Problem("badSignatureAlgorithm", protected["alg"])
        numbers = ec.EllipticCurvePublicNumbers(
            int.from_bytes(unb64(key["x"])), int.from_bytes(unb64(key["y"])), ec.SECP256R1()
        )
        signature = unb64(jws["signature"])
        der = encode_dss_signature(int.from_bytes(signature[:32]), int.from_bytes(signature[32:]))
        signed = f"{jws['protected']}.{jws['payload']}".encode()
        try:
            numbers.public_key().verify(der, signed, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise Problem("malformed", "wrong signature") from None
        payload = json.loads(unb64(jws["payload"]) or b"{}")
        return account or self._account_of(key), payload | ({"_jwk": key} if kind == "newAccount" else {})

    def _account_of(self, key: Json) -> str:
        return next((url for url, known in self._accounts.items() if known == key), "")

    def forget_accounts(self) -> None:
        self._accounts.clear()

    def _newAccount(self, account: str, _: str, payload: Json) -> tuple[int, Json, dict[str, str]]:
        if account:
            return 200, {"status": "valid"}, {"Location": account}
        if payload.get("onlyReturnExisting"):
            raise Problem("accountDoesNotExist", "no account has this key")
        if not payload.get("termsOfServiceAgreed"):
            raise Problem("userActionRequired", "agree to the terms", 403)
        if self.binding is not None:
            self._check_binding(payload.get("externalAccountBinding") or {}, payload["_jwk"])
        account = f"{self.base}/account/{len(self.contacts) + 1}"
        self._accounts[account] = payload["_jwk"]
        self.contacts[account] = payload.get("contact", [])
        return 201, {"status": "valid"}, {"Location": account}

    def _check_binding(self, jws: Json, key: Json) -> None:
        assert self.binding is not None
        if not jws:
            raise Problem("externalAccountRequired", "no binding", 403)
        protected = json.loads(unb64(jws["protected"]))
        signed = f"{jws['protected']}.{jws['payload']}".encode()
        expected = hmac.digest(self.binding[1], signed, "sha256")
        is_bound = json.loads(unb64(jws["payload"])) == key and protected["kid"] == self.binding[0]
        if protected["alg"] != "HS256" or not is_bound or unb64(jws["signature"]) != expected:
            raise Problem("unauthorized", "wrong binding", 403)

    def _account(self, account: str, _: str, payload: Json) -> tuple[int, Json, dict[str, str]]:
        if "contact" in payload:
            self.contacts[account] = payload["contact"]
        return 200, {"status": "valid", "contact": self.contacts[account]}, {"Location": account}

    def _newOrder(self, account: str, _: str, payload: Json) -> tuple[int, Json, dict[str, str]]:
        with self._lock:
            number = str(len(self._orders) + 1)
            urls = []
            for place, identifier in enumerate(payload["identifiers"]):
                name = f"{number}-{place}"
                urls.append(f"{self.base}/authz/{name}")
                self._authorizations[name] = {
                    "status": "pending",
                    "identifier": identifier,
                    "challenges": [
                        {
                            "type": kind,
                            "url": f"{self.base}/challenge/{name}-{kind}",
                            "status": "pending",
                            "token": b64(secrets.token_bytes(32)),
                        }
                        for kind in self.offers
                    ],
                }
            self._orders[number] = {
                "status": "pending",
                "identifiers": payload["identifiers"],
                "authorizations": urls,
                "finalize": f"{self.base}/finalize/{number}",
            }
        return 201, self._orders[number], {"Location": f"{self.base}/order/{number}"}

    def _order(self, account: str, number: str, payload: Json) -> tuple[int, Json, dict[str, str]]:
        return 200, self._orders[number], {"Location": f"{self.base}/order/{number}"}

    def _authz(self, account: str, number: str, payload: Json) -> tuple[int, Json, dict[str, str]]:
        return 200, self._authorizations[number], {"Location": f"{self.base}/authz/{number}"}

    def _challenge(self, account: str, number: str, payload: Json) -> tuple[int, Json, dict[str, str]]:
        name, kind = "-".join(number.split("-")[:2]), "-".join(number.split("-")[2:])
        authorization = self._authorizations[name]
        challenge = next(one for one in authorization["challenges"] if one["type"] == kind)
        key = self._accounts[account]
        canonical = json.dumps(
            {one: key[one] for one in ("crv", "kty", "x", "y")}, separators=(",", ":"), sort_keys=True
        )
        expected = f"{challenge['token']}.{b64(hashlib.sha256(canonical.encode()).digest())}"
        threading.Thread(target=self._verify, args=(authorization, challenge, expected), daemon=True).start()
        return 200, challenge, {"Link": f'<{self.base}/authz/{name}>;rel="up"'}

    def _finalize(self, account: str, number: str, payload: Json) -> tuple[int, Json, dict[str, str]]:
        order = self._orders[number]
        states = {self._authorizations[url.rpartition("/")[2]]["status"] for url in order["authorizations"]}
        if states != {"valid"}:
            raise Problem("orderNotReady", str(states), 403)
        request = x509.load_der_x509_csr(unb64(payload["csr"]))
        asked = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if sorted(asked.get_values_for_type(x509.DNSName)) != sorted(one["value"] for one in order["identifiers"]):
            raise Problem("badCSR", "other names than those of the order")
        self._chains[number] = self._signed(request.public_key(), asked)
        order.update(status="valid", certificate=f"{self.base}/cert/{number}")
        return 200, order, {"Location": f"{self.base}/order/{number}"}

    def _cert(self, account: str, number: str, payload: Json) -> tuple[int, str, dict[str, str]]:
        return 200, self._chains[number], {"Content-Type": "application/pem-certificate-chain"}

    def certificate(self, *names: str) -> tuple[bytes, bytes]:
        """A certificate that nobody ordered, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self.signed_for(pem, *names), pem

    def signed_for(self, key: bytes, *names: str) -> bytes:
        """A certificate that nobody ordered, for a private key."""
        loaded: Any = serialization.load_pem_private_key(key, None)
        asked = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        return self._signed(loaded.public_key(), asked).encode()

    def _signed(self, public_key: Any, names: x509.SubjectAlternativeName) -> str:
        root = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        key: Any = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        begins = datetime.now(UTC) - self.age
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(root.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(begins + self.lives)
            .add_extension(names, critical=True)
            .sign(key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM).decode() + self._ca.cert_pem.bytes().decode()

    # ---- looking at the server

    def _verify(self, authorization: Json, challenge: Json, expected: str) -> None:
        self.may_verify.wait(WAIT_S)
        name, kind = authorization["identifier"]["value"], challenge["type"]
        try:
            look = {"http-01": self._look_by_http, "tls-alpn-01": self._look_by_tls, "dns-01": self._look_at_dns}[kind]
            look(name, challenge["token"], expected)
        except (OSError, AssertionError, ValueError, http.client.HTTPException) as error:
            self.counts[f"{kind} failed"] += 1
            problem = Problem("unauthorized", f"{type(error).__name__}: {error}", 403).body
            challenge.update(status="invalid", error=problem)
            authorization["status"] = "invalid"
        else:
            self.counts[f"{kind} verified"] += 1
            challenge["status"] = "valid"
            authorization["status"] = "valid"

    def _look_by_http(self, name: str, token: str, expected: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=WAIT_S)
        connection.request("GET", f"/.well-known/acme-challenge/{token}", headers={"Host": name})
        answer = connection.getresponse()
        found = answer.read()
        connection.close()
        assert answer.status == 200, f"status {answer.status} from the server"
        assert found == expected.encode(), f"{found!r} is not the key authorization"

    def _look_by_tls(self, name: str, token: str, expected: str) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["acme-tls/1"])
        with (
            socket.create_connection(("127.0.0.1", self.tls_port), WAIT_S) as sock,
            context.wrap_socket(sock, server_hostname=name) as client,
        ):
            assert client.selected_alpn_protocol() == "acme-tls/1", "the server does not speak acme-tls/1"
            der = client.getpeercert(binary_form=True)
        assert der
        extensions = x509.load_der_x509_certificate(der).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [name]
        found = extensions.get_extension_for_oid(ACME_IDENTIFIER)
        assert found.critical
        assert isinstance(found.value, x509.UnrecognizedExtension)
        assert found.value.value == b"\x04\x20" + hashlib.sha256(expected.encode()).digest()

    def _look_at_dns(self, name: str, token: str, expected: str) -> None:
        wanted = b64(hashlib.sha256(expected.encode()).digest())
        assert wanted in self.texts.get(f"_acme-challenge.{name}", []), "no such TXT record"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ca: AcmeAuthority

    def do_HEAD(self) -> None:
        self._handle(b"")

    def do_GET(self) -> None:
        self._handle(b"")

    def do_POST(self) -> None:
        self._handle(self.rfile.read(int(self.headers["Content-Length"])))

    def _handle(self, body: bytes) -> None:
        kind = "application/json"
        try:
            status, found, fields = self.ca.answer(self.command, self.path, body)
        except Problem as problem:
            status, found, kind = problem.status, problem.body, "application/problem+json"
            fields = {"Retry-After": problem.retry_after} if problem.retry_after else {}
        data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        self.send_response(status)
        fields = {"Content-Type": kind, "Replay-Nonce": self.ca.nonce(), "Cache-Control": "no-store"} | fields
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None: ...
