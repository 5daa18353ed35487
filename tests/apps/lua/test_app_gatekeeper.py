"""The application in examples/gatekeeper: tokens, shells over WebSocket, commands, security keys, certificates."""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from smqrt.apps.lua.applications import Application
from smqrt.wire.websocket import TEXT
from tests.apps.lua.app_server import Answer, AppServer
from tests.apps.lua.websocket_client import Client
from tests.support.waiting import wait_until

APP = Path(__file__).parent.parent / "examples" / "gatekeeper"


def children() -> str:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()


@pytest.fixture
def loaded(server: AppServer) -> Iterator[Application]:
    server.services.key_file = server.folder / "own" / "tpm.key"
    before = children()
    application = server.applications.load("", APP)
    assert application.error is None, application.error
    yield application
    application.unload()
    wait_until(lambda: children() == before, "the end of all children")


@pytest.fixture
def app(server: AppServer, loaded: Application) -> AppServer:
    return server


def ask(app: AppServer, target: str, **fields: str) -> Answer:
    return app.ask(f"{target}?{urlencode(fields)}")


def token(app: AppServer, name: str = "anna") -> str:
    found: str = json.loads(ask(app, "/login.lsp", name=name, password="open sesame").body)["token"]
    return found


def test_tokens_require_the_password(app: AppServer) -> None:
    assert ask(app, "/login.lsp", name="anna", password="guess").status == 403
    assert token(app).count(".") == 2


def test_commands_require_a_token(app: AppServer) -> None:
    own = token(app)
    head, claims, signature = own.split(".")
    forged = urlsafe_b64encode(b'{"sub":"root"}').decode().rstrip("=")
    nothing = urlsafe_b64encode(b'{"alg":"none"}').decode().rstrip("=")
    for wrong in ("", "x", own[:-2], f"{head}.{forged}.{signature}", f"{nothing}.{claims}."):
        answer = ask(app, "/run.lsp", token=wrong, command="echo no")
        assert (answer.status, json.loads(answer.body)) == (401, {"error": "failed"})


def test_commands(app: AppServer) -> None:
    command = "echo to $WHO; echo fault >&2; tty; exit 7"
    answer = json.loads(ask(app, "/run.lsp", token=token(app), command=command).body)
    assert answer["out"].startswith("to anna\n/dev/pts/")
    assert (answer["errors"], answer["status"]) == ("fault\n", 7)


def receive_until(client: Client, *wanted: str) -> None:
    text = ""
    while any(one not in text for one in wanted):
        message = client.receive()
        assert message, text
        text += message.data.decode()


def test_shells(app: AppServer) -> None:
    assert ask(app, "/shell.lsp", token=token(app)).status == 404
    clients = [Client(app.port, f"/shell.lsp?token={quote(token(app, name))}") for name in ("anna", "bert")]
    for client in clients:
        client.send(TEXT, b"echo I am $WHO, $((6 * 7)); echo oh >&2\n")
    receive_until(clients[0], "I am anna, 42\r\n", "oh\n")
    receive_until(clients[1], "I am bert, 42\r\n", "oh\n")
    clients[0].send(TEXT, b"exit 3\n")
    receive_until(clients[0], "bye 3")
    assert clients[0].receive() is None


def test_the_application_takes_its_processes_along(app: AppServer, loaded: Application) -> None:
    client = Client(app.port, f"/shell.lsp?token={quote(token(app))}")
    client.send(TEXT, b"echo ready\n")
    receive_until(client, "ready")
    before = children().split()
    assert app.ask("/begin.lsp").text == "begun\n"
    begun = {*children().split()} - {*before}
    assert len(begun) == 1
    loaded.reload()
    wait_until(lambda: not begun & {*children().split()})
    while client.receive() is not None:  # prompts of the shell may be under way
        pass


def test_a_security_key(app: AppServer) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    point = key.public_key().public_numbers()
    x, y = point.x.to_bytes(32), point.y.to_bytes(32)
    cose = b"\xa5\x01\x02\x03\x26\x20\x01\x21\x58\x20" + x + b"\x22\x58\x20" + y
    body = b"\xa2\x64name\x64anna\x63key\x58" + bytes([len(cose)]) + cose
    answer = app.ask("/register.lsp", "POST", body, {"Content-Type": "application/cbor"})
    assert json.loads(answer.body) == {"registered": "anna", "bits": 256}
    broken = app.ask("/register.lsp", "POST", body[:-1], {"Content-Type": "application/cbor"})
    assert broken.status == 400

    def valid(name: str, challenge: bytes) -> Answer:
        signature = key.sign(b"data" * 10 + hashlib.sha256(b"once").digest(), ec.ECDSA(hashes.SHA256()))
        texts = {"data": b"data" * 10, "challenge": challenge, "signature": signature}
        return ask(app, "/prove.lsp", name=name, **{field: b64encode(text).decode() for field, text in texts.items()})

    assert json.loads(valid("anna", b"once").body) == {"valid": True}
    assert json.loads(valid("anna", b"twice").body) == {"valid": False}
    assert valid("bert", b"once").status == 404


def test_the_certificate_of_the_device(app: AppServer) -> None:
    first, second = (x509.load_pem_x509_csr(app.ask("/device.lsp").body) for _ in range(2))
    assert first.is_signature_valid
    assert first.public_key() == second.public_key()
    assert b"PRIVATE KEY" in (app.services.key_file or Path()).read_bytes()
