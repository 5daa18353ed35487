"""Answers to the challenges of a certificate authority, in every process of a server.

The process that orders writes them into a file; all look at that file, so that any of them can answer: a worker, or the
other process of a hot restart.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta

import gevent
from cryptography import x509

from smqrt.acme.files import HTTP_01, TLS_ALPN_01, AcmeFiles, Answer, AnswerReader, self_signed
from smqrt.loop.disk_threads import DiskThreads
from smqrt.transport.tls import ACME_PROTOCOL
from smqrt.transport.tls_contexts import Identity

PREFIX = "/.well-known/acme-challenge/"
LOOK_S = 0.25
_ACME_IDENTIFIER = x509.ObjectIdentifier("1.3.6.1.5.5.7.1.31")
_OCTET_STRING_OF_32 = b"\x04\x20"
disk_threads = DiskThreads("of ACME")

Contexts = Mapping[str, ssl.SSLContext]


class ChallengeAnswers:
    """The answers of this process.

    Args:
        files: where they are written.
        on_contexts: is given what TLS-ALPN-01 needs, by host name, whenever it changes.
    """

    def __init__(self, files: AcmeFiles, on_contexts: Callable[[Contexts], object]) -> None:
        self._files, self._on_contexts = files, on_contexts
        self._texts: dict[str, bytes] = {}
        self._seen = self._said = ""
        self._reader: AnswerReader | None = None
        self._watch: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Read the answers, before a connection of the authority can be accepted, and begin to look for others."""
        self._look()
        self._watch = gevent.spawn(self._look_for_ever)

    def stop(self) -> None:
        """Look no more; what is known is answered still."""
        if self._watch is not None:
            self._watch.kill(block=False)
        if self._reader is not None:
            with suppress(OSError):
                self._reader.close()
            self._reader = None

    def of_path(self, path: str) -> bytes | None:
        """Return what HTTP-01 expects at a path; None when it expects nothing there."""
        return self._texts.get(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else None

    def _look_for_ever(self) -> None:
        while True:
            gevent.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        # A disk that does not answer, a name that can be in no certificate: at the next look.
        with suppress(OSError, ValueError):
            found = disk_threads.call(self._changed)
            if found is not None:
                self._texts, contexts = found
                self._on_contexts(contexts)
            if self._said != self._seen and self._reader is not None:
                said = self._seen
                disk_threads.call(self._reader.has_read, said)
                self._said = said

    def _changed(self) -> tuple[dict[str, bytes], Contexts] | None:
        """What is to be answered, when that is something else than before; in a thread."""
        if self._reader is None:  # first: answers that are published after the look behind it wait for this process
            self._reader = AnswerReader(self._files)
        version = self._files.version()
        if version == self._seen:
            return None
        answers = self._files.published()
        found = _texts(answers), {one.name: _context(one) for one in answers if one.kind == TLS_ALPN_01}
        self._seen = version
        return found


def _texts(answers: Iterable[Answer]) -> dict[str, bytes]:
    return {one.token: one.key_authorization.encode() for one in answers if one.kind == HTTP_01}


def _context(answer: Answer) -> ssl.SSLContext:
    """That of a handshake by which the authority verifies a name (RFC 8737 §3)."""
    digest = hashlib.sha256(answer.key_authorization.encode()).digest()
    extension = x509.UnrecognizedExtension(_ACME_IDENTIFIER, _OCTET_STRING_OF_32 + digest)
    chain, key = self_signed([answer.name], "smqrt ACME challenge", timedelta(days=7), extension)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    Identity(chain, key).load_into(context)
    context.set_alpn_protocols([ACME_PROTOCOL])
    return context
