"""ACME files in the state folder: account, certificate, challenge answers, order state.

    FOLDER/AUTHORITY/account.key, account.json     one account for each certificate authority
    FOLDER/AUTHORITY/NAME/cert.pem, key.pem        the certificate in use; self-signed until the first order succeeds
    FOLDER/AUTHORITY/NAME/answers.json             the challenge answers while the authority verifies the names
    FOLDER/AUTHORITY/NAME/readers/                 a file for each process that serves answers: the version it has read
    FOLDER/AUTHORITY/NAME/state.json               failures, and the time of the next order

Only the owner can read the files. Each is replaced atomically. File operations block; `ChallengeAnswers` runs them in a
thread.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import gevent
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from smqrt.errors import ArgumentError
from smqrt.loop.threads import DiskThreads
from smqrt.transport.tls import ACME_PROTOCOL
from smqrt.transport.tls_contexts import Identity, host_names

MAX_STATE_BYTES = 1 << 20
HTTP_01, TLS_ALPN_01, DNS_01 = "http-01", "tls-alpn-01", "dns-01"
_SELF_SIGNED = "smqrt self-signed, until a certificate has been ordered"
_SELF_SIGNED_DAYS = 397  # the longest lifetime that browsers accept
_RENEW_AT = 1 / 3  # remaining share of the lifetime at which a certificate is renewed
_SPREAD = 1 / 20  # share of the lifetime over which the renewals of simultaneous orders are spread
_STALE_READER_S = 60.0  # age at which an unlocked file of an `AnswerReader` is removed


@dataclass(frozen=True)
class Answer:
    """The answer to a challenge; the authority reads it to verify a name.

    Attributes:
        kind: the kind of the challenge: `HTTP_01`, `TLS_ALPN_01` or `DNS_01`.
        name: the host name.
        token: the token of the challenge.
        key_authorization: the token and the thumbprint of the account's key (RFC 8555 §8.1).
    """

    kind: str
    name: str
    token: str
    key_authorization: str


@dataclass(frozen=True)
class State:
    """The state of orders, preserved over restarts.

    Attributes:
        failures: number of consecutive failed orders.
        next_s: earliest time of the next order, in Unix seconds; 0 when only the certificate's lifetime determines it.
        fault: why the last order failed; empty after a success.
        kind: the challenge kind of the last order.
    """

    failures: int = 0
    next_s: float = 0.0
    fault: str = ""
    kind: str = ""


@dataclass(frozen=True)
class AcmeFiles:
    """The files of one certificate.

    Args:
        folder: the state folder for ACME.
        directory: URL of the authority's directory.
        names: host names of the certificate; the first one names its folder.

    Attributes:
        account: folder of the account.
        own: folder of the certificate.
    """

    folder: Path
    directory: str
    names: tuple[str, ...]
    account: Path = field(init=False)
    own: Path = field(init=False)

    def __post_init__(self) -> None:
        # The host and path of the directory as one folder name.
        authority = re.sub(r"[^A-Za-z0-9.-]+", "_", self.directory.partition("://")[2]).strip("._")
        object.__setattr__(self, "account", self.folder / authority)
        object.__setattr__(self, "own", self.folder / authority / self.names[0])

    @property
    def cert(self) -> Path:
        """The certificate with its chain."""
        return self.own / "cert.pem"

    @property
    def key(self) -> Path:
        """Its private key."""
        return self.own / "key.pem"

    @property
    def answers(self) -> Path:
        """The answers to challenges."""
        return self.own / "answers.json"

    @property
    def readers(self) -> Path:
        """The folder with a file for each process that serves challenge answers."""
        return self.own / "readers"

    # ---- the certificate

    def prepare(self) -> None:
        """Create a self-signed certificate unless a usable one exists. Raises OSError."""
        make_private_folder(self.own)
        try:
            Identity(self.cert.read_bytes(), self.key.read_bytes())
        except (OSError, ArgumentError):
            self.store(*self_signed(self.names, _SELF_SIGNED, timedelta(days=_SELF_SIGNED_DAYS)))

    def store(self, chain: bytes, key: bytes) -> None:
        """Replace key and certificate; readers reload after both files are unchanged for a while. Raises OSError."""
        write_private(self.key, key)
        write_private(self.cert, chain)

    def due_s(self) -> float:
        """Return when renewal is due, in Unix seconds: shortly before the last third of the certificate's lifetime.

        Return 0 for a certificate that is self-signed, unreadable, or for other names.
        """
        try:
            leaf = x509.load_pem_x509_certificate(self.cert.read_bytes())
            if leaf.issuer == leaf.subject or not set(self.names) <= set(host_names(leaf)):
                return 0.0
        except (OSError, ValueError):
            return 0.0
        begins_s, ends_s = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
        spread = random.Random(leaf.serial_number).random() * _SPREAD  # seeded: constant for a certificate
        return ends_s - (ends_s - begins_s) * (_RENEW_AT + spread)

    # ---- shared between processes

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Try to lock the files; yield whether this process may order. During a hot restart two processes try."""
        make_private_folder(self.own)
        fd = os.open(self.own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)

    def publish(self, answers: Sequence[Answer]) -> None:
        """Write the answers for all processes of the server. Raises OSError."""
        write_private(self.answers, json.dumps([asdict(one) for one in answers]).encode())

    def forget_answers(self) -> None:
        """Remove the answers of a killed process; those of a running order are kept."""
        with self.locked() as has_lock, suppress(FileNotFoundError):
            if has_lock:
                self.answers.unlink()

    def published(self) -> list[Answer]:
        """Return the published answers; none when the file is missing or damaged."""
        with suppress(OSError, ValueError, TypeError):
            return [Answer(**one) for one in json.loads(_content(self.answers))]
        return []

    def version(self) -> str:
        """Return a string that changes with the published answers; empty without answers."""
        with suppress(FileNotFoundError):
            info = self.answers.stat()
            return f"{info.st_mtime_ns} {info.st_ino}"
        return ""

    def all_have_read(self, version: str) -> bool:
        """Return whether all processes that serve challenge answers have read this version. Raises OSError."""
        for path in self.readers.iterdir() if self.readers.is_dir() else ():
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # its process runs
                if os.read(fd, 100).decode() != version:
                    return False
            else:
                # Unlocked: its process was killed, or has just created the file and not locked it yet.
                if os.fstat(fd).st_mtime + _STALE_READER_S < time.time():
                    path.unlink(missing_ok=True)
            finally:
                os.close(fd)
        return True

    def state(self) -> State:
        """Return the stored state of orders."""
        with suppress(OSError, ValueError, TypeError):
            return State(**json.loads(_content(self.own / "state.json")))
        return State()

    def store_state(self, state: State) -> None:
        """Store the state of orders. Raises OSError."""
        write_private(self.own / "state.json", json.dumps(asdict(state)).encode())


class AnswerReader:
    """A file with the version of the answers that this process has read. All calls block.

    The process holds a lock on the file, so that an order does not wait for a killed process.

    Args:
        files: the files with the answers.

    Raises:
        OSError: the file cannot be created.
    """

    _fd = -1

    def __init__(self, files: AcmeFiles) -> None:
        make_private_folder(files.readers)
        self._path = files.readers / f"{os.getpid()}-{secrets.token_hex(8)}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # another process holds it only during `all_have_read`

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # not in `close`: a thread may still write

    def has_read(self, version: str) -> None:
        """Record the version that this process has read. Raises OSError."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, version.encode(), 0)

    def close(self) -> None:
        """Remove the file, so that orders do not wait for this process."""
        self._path.unlink(missing_ok=True)


def make_private_folder(path: Path) -> None:
    """Create a folder and its missing parents; only the owner can access them. Raises OSError."""
    if not path.is_dir():
        make_private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically; only the owner can read the new one. Raises OSError."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)  # a crash must not leave an empty key for an issued certificate
    fresh.replace(path)


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_STATE_BYTES)


def new_key() -> bytes:
    """Create a private key (P-256), as PEM text."""
    return key_pem(ec.generate_private_key(ec.SECP256R1()))


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a key as PEM text."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def self_signed(
    names: Sequence[str], subject: str, lifetime: timedelta, *extensions: x509.ExtensionType
) -> tuple[bytes, bytes]:
    """Create a self-signed certificate; return it and its key, PEM.

    Args:
        names: host names.
        subject: common name.
        lifetime: duration of its validity.
        extensions: critical extensions.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clients may have clocks that are behind
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(one) for one in names]), critical=False)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), key_pem(key)


# ---- Challenge answers in all processes of a server.
#
# The process that orders writes the answers to a file. All processes read this file, because the authority may connect
# to any of them: each worker, and both processes of a hot restart.

PREFIX = "/.well-known/acme-challenge/"
POLL_S = 0.25
_ACME_IDENTIFIER = x509.ObjectIdentifier("1.3.6.1.5.5.7.1.31")
_OCTET_STRING_OF_32 = b"\x04\x20"  # DER tag and length
disk_threads = DiskThreads("of ACME")

Contexts = Mapping[str, ssl.SSLContext]


class ChallengeAnswers:
    """The challenge answers of this process.

    Args:
        files: the files with the answers.
        on_contexts: called with the TLS contexts for TLS-ALPN-01, by host name, when they change.
    """

    def __init__(self, files: AcmeFiles, on_contexts: Callable[[Contexts], object]) -> None:
        self._files, self._on_contexts = files, on_contexts
        self._texts: dict[str, bytes] = {}
        self._read_version = self._confirmed_version = ""
        self._reader: AnswerReader | None = None
        self._poller: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Read the answers, then poll for changes. Call this before the listeners accept connections."""
        self._update()
        self._poller = gevent.spawn(self._poll)

    def stop(self) -> None:
        """Stop polling; the current answers remain available."""
        if self._poller is not None:
            self._poller.kill(block=False)
        if self._reader is not None:
            with suppress(OSError):
                self._reader.close()
            self._reader = None

    def of_path(self, path: str) -> bytes | None:
        """Return the HTTP-01 answer at a path, or None."""
        return self._texts.get(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else None

    def _poll(self) -> None:
        while True:
            gevent.sleep(POLL_S)
            self._update()

    def _update(self) -> None:
        # After an error the next poll tries again. ValueError: a name that is not possible in a certificate.
        with suppress(OSError, ValueError):
            changed = disk_threads.call(self._read_changed)
            if changed is not None:
                self._texts, contexts = changed
                self._on_contexts(contexts)
            # Only now: the order continues when all processes have confirmed that they serve the answers.
            if self._confirmed_version != self._read_version and self._reader is not None:
                version = self._read_version
                disk_threads.call(self._reader.has_read, version)
                self._confirmed_version = version

    def _read_changed(self) -> tuple[dict[str, bytes], Contexts] | None:
        """Return HTTP-01 texts by token and TLS-ALPN-01 contexts by name when they have changed. Runs in a thread."""
        if self._reader is None:  # before reading: an order that publishes later then waits for this process
            self._reader = AnswerReader(self._files)
        version = self._files.version()
        if version == self._read_version:
            return None
        answers = self._files.published()
        texts = {one.token: one.key_authorization.encode() for one in answers if one.kind == HTTP_01}
        contexts = {one.name: _challenge_context(one) for one in answers if one.kind == TLS_ALPN_01}
        self._read_version = version
        return texts, contexts


def _challenge_context(answer: Answer) -> ssl.SSLContext:
    """Return the TLS context for the handshake that verifies a name (RFC 8737 §3)."""
    digest = hashlib.sha256(answer.key_authorization.encode()).digest()
    extension = x509.UnrecognizedExtension(_ACME_IDENTIFIER, _OCTET_STRING_OF_32 + digest)
    chain, key = self_signed([answer.name], "smqrt ACME challenge", timedelta(days=7), extension)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    Identity(chain, key).load_into(context)
    context.set_alpn_protocols([ACME_PROTOCOL])
    return context
