"""Files of ACME in the state folder: the account, the certificate with its key, answers to challenges, what failed.

    FOLDER/AUTHORITY/account.key, account.json     one account for each certificate authority
    FOLDER/AUTHORITY/NAME/cert.pem, key.pem        the certificate in use; self-signed until the first has been ordered
    FOLDER/AUTHORITY/NAME/answers.json             what the authority asks for while it verifies the names
    FOLDER/AUTHORITY/NAME/readers/                 one file for each process that gives answers: which it has read
    FOLDER/AUTHORITY/NAME/state.json               failures, and when the next order is due

All files are for their owner only, and are replaced as a whole. Everything here blocks.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from smqrt.transport.certificates import host_names
from smqrt.transport.tls import ACME_PROTOCOL
from smqrt.transport.tls_contexts import Identity

MAX_STATE_BYTES = 1 << 20
HTTP_01, TLS_ALPN_01, DNS_01 = "http-01", "tls-alpn-01", "dns-01"
_SELF_SIGNED = "smqrt self-signed, until a certificate has been ordered"
_SELF_SIGNED_DAYS = 397  # what browsers accept at most
_RENEWED_WHEN_LEFT = 1 / 3
_SPREAD = 1 / 20
"""Of the lifetime: certificates that were ordered at the same time are not renewed at the same time."""


_DEAD_S = 60.0
"""So old an unlocked file of `AnswerReader` must be before it is removed."""


@dataclass(frozen=True)
class Answer:
    """What the authority finds at the server while it verifies a name.

    Attributes:
        kind: of the challenge: `HTTP_01`, `TLS_ALPN_01` or `DNS_01`.
        name: the host name.
        token: of the challenge.
        key_authorization: the token with the fingerprint of the account's key (RFC 8555 §8.1).
    """

    kind: str
    name: str
    token: str
    key_authorization: str


@dataclass(frozen=True)
class State:
    """What is kept of orders from one start to the next.

    Attributes:
        failures: how many orders in a row have failed.
        next_s: when the next one is due, in Unix seconds; 0 when only the certificate says when.
        fault: why the last one failed; empty when it did not.
        kind: of the challenges of the last order.
    """

    failures: int = 0
    next_s: float = 0.0
    fault: str = ""
    kind: str = ""


@dataclass(frozen=True)
class AcmeFiles:
    """The files of one certificate.

    Args:
        folder: the state folder of ACME.
        directory: URL of the authority's directory.
        names: host names of the certificate; the first one names its folder.
    """

    folder: Path
    directory: str
    names: tuple[str, ...]
    account: Path = field(init=False)
    own: Path = field(init=False)

    def __post_init__(self) -> None:
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
        """The folder of the processes that give answers."""
        return self.own / "readers"

    # ---- the certificate

    def prepare(self) -> None:
        """Make a self-signed certificate unless there is one that can be used. Raises OSError."""
        private_folder(self.own)
        try:
            Identity(self.cert.read_bytes(), self.key.read_bytes())
        except (OSError, ArgumentError):
            self.store(*_self_signed(self.names))

    def store(self, chain: bytes, key: bytes) -> None:
        """Replace certificate and key; those that read them wait until both have settled. Raises OSError."""
        write_private(self.key, key)
        write_private(self.cert, chain)

    def due_s(self) -> float:
        """Return when the certificate is to be replaced, in Unix seconds: 0 for one that is self-signed, for other
        names or unreadable, else a moment before the last third of its lifetime."""
        try:
            leaf = x509.load_pem_x509_certificate(self.cert.read_bytes())
            if leaf.issuer == leaf.subject or not set(self.names) <= set(host_names(leaf)):
                return 0.0
        except (OSError, ValueError):
            return 0.0
        begins_s, ends_s = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
        spread = random.Random(leaf.serial_number).random() * _SPREAD  # the same for every look at this certificate
        return ends_s - (ends_s - begins_s) * (_RENEWED_WHEN_LEFT + spread)

    # ---- what one process tells the others

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Give whether this process alone may order now; another one may, of a hot restart for example."""
        private_folder(self.own)
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
        """Let all processes of the server give these answers. Raises OSError."""
        write_private(self.answers, json.dumps([asdict(one) for one in answers]).encode())

    def forget_answers(self) -> None:
        """Remove answers that a process left behind which was killed; those of an order that is under way stay."""
        with self.locked() as is_alone, suppress(FileNotFoundError):
            if is_alone:
                self.answers.unlink()

    def published(self) -> list[Answer]:
        """Return the answers to give; none when the file is missing or damaged."""
        with suppress(OSError, ValueError, TypeError):
            return [Answer(**one) for one in json.loads(_content(self.answers))]
        return []

    def version(self) -> str:
        """Return a text that changes with the published answers; empty when there are none."""
        with suppress(FileNotFoundError):
            info = self.answers.stat()
            return f"{info.st_mtime_ns} {info.st_ino}"
        return ""

    def all_have_read(self, version: str) -> bool:
        """Return whether every process that gives answers has read this version of them. Raises OSError."""
        return all(_has_read(path, version) for path in self.readers.iterdir()) if self.readers.is_dir() else True

    def state(self) -> State:
        """Return what was kept of earlier orders."""
        with suppress(OSError, ValueError, TypeError):
            return State(**json.loads(_content(self.own / "state.json")))
        return State()

    def keep(self, state: State) -> None:
        """Keep it. Raises OSError."""
        write_private(self.own / "state.json", json.dumps(asdict(state)).encode())


class AnswerReader:
    """A process that gives answers: its file names the version that it has read. Everything here blocks.

    The file is locked while the process lives, so that one which was killed is not waited for.

    Args:
        files: where the answers are. Raises OSError.
    """

    _fd = -1

    def __init__(self, files: AcmeFiles) -> None:
        private_folder(files.readers)
        self._path = files.readers / f"{os.getpid()}-{secrets.token_hex(8)}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # at once, or after the moment that another process looks

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # not in `close`: a thread may still write

    def has_read(self, version: str) -> None:
        """Name the version that this process gives from now on. Raises OSError."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, version.encode(), 0)

    def close(self) -> None:
        """Do not wait for this process any more."""
        self._path.unlink(missing_ok=True)


def _has_read(path: Path, version: str) -> bool:
    """Whether a process has read this version, or does not live any more."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(fd, 100).decode() == version
    else:
        # Unlocked: of a process that was killed, or of one that is between making the file and locking it.
        if os.fstat(fd).st_mtime + _DEAD_S < time.time():
            path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def private_folder(path: Path) -> None:
    """Make a folder, and those above that are missing, for their owner only. Raises OSError."""
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file by one that only its owner can read. Raises OSError."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)  # a crash must not leave an empty key behind a certificate that counts at the authority
    fresh.replace(path)


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_STATE_BYTES)


def new_key() -> bytes:
    """Make a private key (P-256), as PEM text."""
    return key_pem(ec.generate_private_key(ec.SECP256R1()))


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a key as PEM text."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _self_signed(names: Sequence[str]) -> tuple[bytes, bytes]:
    return self_signed(names, _SELF_SIGNED, timedelta(days=_SELF_SIGNED_DAYS))


def self_signed(names: Sequence[str], subject: str, lives: timedelta, *more: x509.ExtensionType) -> tuple[bytes, bytes]:
    """Make a self-signed certificate; return it and its key, PEM.

    Args:
        names: host names.
        subject: its common name.
        lives: how long it is valid.
        more: critical extensions.
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
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + lives)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(one) for one in names]), critical=False)
    )
    for extension in more:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), key_pem(key)


# ---- Answers to the challenges of a certificate authority, in every process of a server.
#
# The process that orders writes them into a file. All processes read that file, so that any of them can answer: a
# worker, or the other process of a hot restart.

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
