"""Mail servers for tests: a real one (aiosmtpd) in a thread, and one that says what a test writes down."""

from __future__ import annotations

import ssl
import warnings
from collections.abc import Sequence
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session
from gevent import socket, spawn

from tests.conftest import free_port


class Mailbox:
    """A server that keeps what it gets.

    Args:
        tls: for connections that begin with it.
        starttls: for those that change to it; then nothing else is taken in clear text.
        users: names and passwords; with some, everybody logs in.
        mechanisms: of AUTH that are offered; all without.
        refused: recipients that are not known here.

    Attributes:
        envelopes: what came, see `aiosmtpd`.
        logins: mechanisms that were used.
    """

    def __init__(
        self,
        tls: ssl.SSLContext | None = None,
        starttls: ssl.SSLContext | None = None,
        users: dict[str, str] | None = None,
        mechanisms: Sequence[str] = (),
        refused: Sequence[str] = (),
    ) -> None:
        self.envelopes: list[Envelope] = []
        self.logins: list[str] = []
        self.was_secure: list[bool] = []
        self._users, self._refused = users or {}, refused
        out = [name for name in ("PLAIN", "LOGIN") if mechanisms and name not in mechanisms]
        warnings.filterwarnings("ignore", "Requiring AUTH while not requiring TLS")
        self._controller = Controller(
            self,
            hostname="127.0.0.1",
            port=free_port(),
            ssl_context=tls,
            tls_context=starttls,
            require_starttls=starttls is not None,
            authenticator=self._authenticate if users else None,
            auth_required=bool(users),
            auth_require_tls=starttls is not None,
            auth_exclude_mechanism=out,
            data_size_limit=40 << 20,
        )

    def __enter__(self) -> Mailbox:
        self._controller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._controller.stop()

    @property
    def port(self) -> int:
        return self._controller.port

    @property
    def mails(self) -> list[EmailMessage]:
        return [message_from_bytes(one.content, policy=policy.default) for one in self.envelopes]  # type: ignore[misc]

    def _authenticate(
        self, server: SMTP, session: Session, envelope: Envelope, mechanism: str, data: Any
    ) -> AuthResult:
        assert isinstance(data, LoginPassword)
        self.logins.append(mechanism)
        return AuthResult(success=self._users.get(data.login.decode()) == data.password.decode(), handled=False)

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self._refused:
            return "550 5.1.1 nobody of that name"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        self.envelopes.append(envelope)
        self.was_secure.append(session.ssl is not None or self._controller.ssl_context is not None)
        return "250 kept"


class ScriptedSmtp:
    """A server that answers each line by its first word.

    Args:
        answers: by the word, in small letters; "" is the greeting. None: no answer; a tuple: one after the other.

    Attributes:
        lines: what the client said.
    """

    def __init__(self, **answers: bytes | None | tuple[bytes, ...]) -> None:
        plain = {"greeting": b"220 x", "ehlo": b"250 x", "mail": b"250 ok", "rcpt": b"250 ok", "data": b"354 go"}
        self._answers = plain | {"end": b"250 kept", "quit": b"221 bye", "rset": b"250 ok"} | answers
        self.lines: list[bytes] = []
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port = self._listener.getsockname()[1]
        self._job = spawn(self._accept)

    def __enter__(self) -> ScriptedSmtp:
        return self

    def __exit__(self, *_: object) -> None:
        self._job.kill()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        in_data = False
        self._answer(client, "greeting")
        with client, client.makefile("rb") as lines:
            try:
                for line in lines:
                    self.lines.append(line.rstrip(b"\r\n"))
                    if in_data and line != b".\r\n":
                        continue
                    word = "end" if in_data else line.split()[0].decode().lower()
                    in_data = word == "data"
                    self._answer(client, word)
            except OSError:
                pass  # the client is gone

    def _answer(self, client: socket.socket, word: str) -> None:
        answer: Any = self._answers.get(word, b"500 what?")
        if isinstance(answer, tuple):
            answer, self._answers[word] = answer[0], answer[1:]
        if answer is not None:
            client.sendall(answer + b"\r\n")
