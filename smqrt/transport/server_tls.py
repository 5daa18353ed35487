"""TLS of a listener: certificates by server name, client certificates and their revocation, read again without an end.

OpenSSL chooses what a handshake uses when it begins, so new files reach the handshakes from then on and no connection
that is open. What clients are trusted by never changes inside a context: an `SSLContext` learns authorities and forgets
none, and sessions that it has begun go on without a second look at the client's certificate. So a change there makes
new contexts, with which older sessions end. A new certificate alone goes into the context that is in use: its tickets
stay good.
"""

from __future__ import annotations

import _ssl
import contextlib
import logging
import os
import ssl
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from cryptography import x509
from gevent.lock import BoundedSemaphore

from smqrt.errors import ArgumentError, StartError
from smqrt.loop.threads import DiskThreads
from smqrt.transport.certificates import host_names, key_kind
from smqrt.transport.tls import ACME_PROTOCOL
from smqrt.transport.tls_contexts import Identity

# ---- The TLS of a listener while it runs: which context the next handshake gets, and what an operator is told of it.

log = logging.getLogger("smqrt")

_threads = DiskThreads("of the certificates")
_on_name: Any = (
    _ssl._SSLContext.sni_callback
)  # that of gevent, which `smqrt serve` patches in, takes gevent's sockets only
_on_message: Any = _ssl._SSLContext._msg_callback  # type: ignore[attr-defined]  # the only way to see the first message
_CLIENT_HELLO = 1
_OFFERS_ACME = bytes([len(ACME_PROTOCOL)]) + ACME_PROTOCOL.encode()


def _now() -> datetime:
    return datetime.now(UTC)


class ListenerTls:
    """Reads the files of a listener at once, and again with `reload`.

    Args:
        files: what is read, and how TLS is spoken.
        clock: gives the time of day.

    Attributes:
        context: for the next handshake.
        fault: why the files could not be read the last time; None when they could.
        reloads, failures: how often they were read again, and how often that failed.

    Raises:
        StartError: a file is missing or wrong; one sentence that names it.
    """

    def __init__(self, files: TlsFiles, clock: Callable[[], datetime] = _now) -> None:
        self.tls_files = files
        self._clock = clock
        self._warned: dict[str, object] = {}
        self._one_at_a_time = BoundedSemaphore()
        self._challenges: Mapping[str, ssl.SSLContext] = {}
        self._offers_acme: WeakSet[ssl.SSLObject] = WeakSet()
        self._loaded = load(files, clock())
        self.fault: str | None = None
        self.reloads = self.failures = 0
        self._began = self.read_at = clock()
        self.context = self._loaded.default
        self._listen_for_names(self._loaded)
        self._tell(self._loaded.troubles)
        self.look_at_the_clock()

    @property
    def files(self) -> list[str]:
        """What is read."""
        return self.tls_files.files

    @property
    def certificates(self) -> list[Certificate]:
        """The certificates in use."""
        return self._loaded.certificates

    def reload(self, in_thread: bool = True) -> str | None:
        """Read the files again. Wrong ones change nothing.

        Args:
            in_thread: blocks this greenlet, and holds nobody else.

        Returns:
            Why they were not taken; None when they were.
        """
        if not in_thread:
            return self._reload(load)
        with self._one_at_a_time:  # or the older of two might come last
            return self._reload(partial(_threads.call, load))

    def _reload(self, read: Callable[[TlsFiles, datetime], Loaded]) -> str | None:
        try:
            loaded = read(self.tls_files, self._clock())
            self.fault = self._why_not(loaded)
        except (StartError, TimeoutError) as error:
            self.fault = str(error)
        if self.fault is None:
            self.reloads += 1
            self.read_at = self._clock()
            self._take(loaded)
            self._tell(loaded.troubles)
            self.look_at_the_clock()
        else:
            self.failures += 1
        return self.fault

    def change(self, files: TlsFiles) -> None:
        """Go on with other files, or another way to speak TLS, from the next handshake on; blocks this greenlet.

        Raises:
            StartError: they are wrong, and nothing has changed.
        """
        if files == self.tls_files:
            return
        before, self.tls_files = self.tls_files, files
        if fault := self.reload():
            self.tls_files = before
            raise StartError(fault)

    def _why_not(self, loaded: Loaded) -> str | None:
        """What is no longer valid, or not yet, does not replace what is."""
        now = self._clock()
        before = {one.path: one.trouble(now) for one in self.certificates}
        for one in loaded.certificates:
            trouble = one.trouble(now)
            if trouble and before.get(one.path, trouble) is None:
                return f"{trouble}; the one in use is valid"
        old, new = self._loaded.trust.until, loaded.trust.until
        if new and new < now and old and old >= now:
            return f"the revocation list {self.tls_files.client_crl} has expired; the one in use is valid"
        return None

    def _take(self, loaded: Loaded) -> None:
        if not self._adopted(loaded):
            self.context, self._began = loaded.default, self._clock()
        self._listen_for_names(loaded)
        self._loaded = loaded
        self._warned.clear()

    def _adopted(self, loaded: Loaded) -> bool:
        """Give the context in use the new certificates, so that its tickets stay good; false when that can't be."""
        new, old = loaded.default_identities, self._loaded.default_identities
        if loaded.trust != self._loaded.trust or loaded.ways != self._loaded.ways or new.keys() != old.keys():
            return False
        try:
            for identity in new.values():
                identity.load_into(self.context)
        except (OSError, ArgumentError):  # no file descriptor left, perhaps after one of two: the new context has all
            return False
        loaded.names = {name: self.context if one is loaded.default else one for name, one in loaded.names.items()}
        loaded.default = self.context
        return True

    def _listen_for_names(self, loaded: Loaded) -> None:
        several = len(set(loaded.names.values()) | {loaded.default}) > 1
        is_asked = bool(self._challenges)
        _on_name.__set__(loaded.default, self._choose if several or is_asked else None)  # without, it is cheaper
        _on_message.__set__(loaded.default, self._look_at_hello if is_asked else None)

    def answer_challenges(self, contexts: Mapping[str, ssl.SSLContext]) -> None:
        """From the next handshake on, give clients that offer `ACME_PROTOCOL` these contexts by the name they ask for;
        none: as all others."""
        self._challenges = contexts
        self._listen_for_names(self._loaded)

    def _look_at_hello(self, client: Any, direction: str, *about: Any) -> None:
        """Take a message of a handshake: version, kind of content, kind of message, data. It comes before the choice
        by name, when Python does not tell yet what the client offers."""
        if about[2] == _CLIENT_HELLO and direction == "read" and _OFFERS_ACME in about[3]:
            self._offers_acme.add(client)

    def _choose(self, client: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        challenge = self._challenges.get(name.lower()) if name and client in self._offers_acme else None
        if challenge is not None:
            client.context = challenge
            return
        found = self._context_of(name) if name else None
        if found is not None and found is not client.context:
            client.context = found

    def _context_of(self, name: str) -> ssl.SSLContext | None:
        names, name = self._loaded.names, name.lower()
        return names.get(name) or names.get("*." + name.partition(".")[2])

    def look_at_the_clock(self) -> None:
        """What time brings: lines before and when certificates end, and new keys for tickets once a day."""
        now = self._clock()
        for certificate in self.certificates:
            self._warn(certificate, now)
        until = self._loaded.trust.until
        if until and until < now:
            line = f"the revocation list {self.tls_files.client_crl} has expired at {shown(until)}"
            self._once("list", True, f"{line}: clients with a certificate are refused until there is a new one")
        lists_ended = until is not None and self._began < until <= now
        if now - self._began > KEYS_LAST or lists_ended:  # then sessions of clients with certificates end too
            with contextlib.suppress(OSError, StartError):  # no file descriptor left: the next time
                fresh = made(self.tls_files, self._loaded.pairs, self._loaded.trust)
                self.context, self._began, self._loaded = fresh.default, now, fresh
                self._listen_for_names(fresh)

    def _warn(self, certificate: Certificate, now: datetime) -> None:
        days, trouble = certificate.warns_days(now), certificate.trouble(now)
        if trouble:
            self._once(certificate.path, trouble, trouble)
        elif days is not None:
            left = "a day" if days == 1 else f"{days} days"
            self._once(
                certificate.path,
                days,
                f"the certificate {certificate.path} expires within {left}, at {shown(certificate.not_after)}",
            )

    def _once(self, what: str, state: object, line: str) -> None:
        if self._warned.get(what) != state:
            self._warned[what] = state
            self._tell([line])

    def _tell(self, lines: Iterable[str]) -> None:
        for line in lines:
            log.warning("%s: %s", self.tls_files.what or "TLS", line)

    def snapshot(self) -> dict[str, object]:
        """What an operator asks, as JSON has it; times in Unix seconds."""
        until = self._loaded.trust.until
        return {
            "certificates": [_described(one) for one in self.certificates],
            "client_certificate": {0: "none", 1: "optional", 2: "required"}[self.tls_files.mode],
            "client_ca": self.tls_files.client_ca,
            "client_crl": self.tls_files.client_crl,
            "client_crl_not_after_s": until.timestamp() if until else None,
            "minimum_version": self.tls_files.minimum,
            "alpn": list(self.tls_files.alpn),
            "read_at_s": self.read_at.timestamp(),
            "reloads": self.reloads,
            "reload_failures": self.failures,
            "fault": self.fault,
        }


def _described(certificate: Certificate) -> dict[str, object]:
    return {
        "file": certificate.path,
        "subject": certificate.subject,
        "names": list(certificate.names),
        "key": certificate.kind,
        "not_before_s": certificate.not_before.timestamp(),
        "not_after_s": certificate.not_after.timestamp(),
    }


TICKETS = 1
"""For each handshake of TLS 1.3: who reconnects needs one. OpenSSL's two cost 6 % of a handshake."""
KEYS_LAST = timedelta(days=1)
"""So long tickets are encrypted with one key: who finds it later can read no more than a day of TLS 1.2."""
WARN_DAYS = (30, 7, 1)
_ENCRYPTED = (b"-----BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED")
_LIVES_AT_LEAST = 3
"""Times the warning, for it to be one: of certificates that are renewed each week, 30 days mean nothing."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a listener, and how it speaks TLS.

    Attributes:
        pairs: files with a certificate and its chain, and with its private key; the first pair is for clients that name
            no server, or an unknown one.
        client_ca: file with the authorities of client certificates.
        client_crl: file with their revocation lists.
        client_certificate: "none", "optional" or "required"; None is "optional" where there are authorities.
        minimum: "1.2" or "1.3".
        alpn: the protocols of the listener, the best first; empty for no choice by ALPN.
        what: the listener, at the beginning of errors: "listener.main"; empty for the only one.
        key_password: of private keys that are protected by one.
    """

    pairs: tuple[tuple[str, str], ...]
    client_ca: str | None = None
    client_crl: str | None = None
    client_certificate: str | None = None
    minimum: str = "1.2"
    alpn: tuple[str, ...] = ()
    what: str = ""
    key_password: str | None = field(default=None, repr=False)

    @property
    def files(self) -> list[str]:
        """All files, each once."""
        paths = [path for pair in self.pairs for path in pair]
        return list(dict.fromkeys([*paths, *filter(None, (self.client_ca, self.client_crl))]))

    @property
    def mode(self) -> ssl.VerifyMode:
        """Whether clients are asked for a certificate."""
        if self.client_certificate is None:
            return ssl.CERT_OPTIONAL if self.client_ca else ssl.CERT_NONE
        return {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}[
            self.client_certificate
        ]


@dataclass(frozen=True, slots=True)
class Certificate:
    """A server's certificate, as far as an operator asks.

    Attributes:
        path: its file.
        subject: its subject, such as "CN=example.com".
        names: the names of servers that it is for.
        kind: of its key: "RSA", "EC" ...
    """

    path: str
    subject: str
    names: tuple[str, ...]
    kind: str
    not_before: datetime
    not_after: datetime

    def trouble(self, now: datetime) -> str | None:
        """Why it is not valid at that moment; None when it is."""
        if now > self.not_after:
            return f"the certificate {self.path} has expired at {shown(self.not_after)}"
        if now < self.not_before:
            return f"the certificate {self.path} is not valid before {shown(self.not_before)}"
        return None

    def warns_days(self, now: datetime) -> int | None:
        """The nearest of `WARN_DAYS` before its end that has passed; None when none has."""
        lives, left = self.not_after - self.not_before, self.not_after - now
        passed = [days for days in WARN_DAYS if left <= timedelta(days) and lives >= _LIVES_AT_LEAST * timedelta(days)]
        return min(passed, default=None)


@dataclass(slots=True)
class Pair:
    """A certificate with its key, and what it says.

    Attributes:
        trouble: what is to be told of the key though it is used.
    """

    identity: Identity
    facts: Certificate
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom clients are trusted by.

    Attributes:
        authorities, lists: the content of the files.
        until: when the first of the revocation lists ends.
        troubles: what is to be told though all of it is used.
    """

    authorities: bytes = b""
    lists: bytes = b""
    until: datetime | None = field(default=None, compare=False)
    troubles: tuple[str, ...] = field(default=(), compare=False)


@dataclass(slots=True)
class Loaded:
    """What was read of the files of a listener, and found good.

    Attributes:
        default: for clients that name no server of `names`, or none.
        names: contexts by the name that a client asks for; `*.example.com` for all names one level below.
        pairs: in the order of the settings.
        trust: whom clients are trusted by.
        ways: how TLS is spoken: all of the settings but the files.
    """

    default: ssl.SSLContext
    names: dict[str, ssl.SSLContext]
    pairs: list[Pair]
    trust: Trust
    ways: tuple[object, ...]

    @property
    def certificates(self) -> list[Certificate]:
        """What the certificates say."""
        return [pair.facts for pair in self.pairs]

    @property
    def troubles(self) -> list[str]:
        """What is to be told though all of it is used."""
        return [*filter(None, (pair.trouble for pair in self.pairs)), *self.trust.troubles]

    @property
    def default_identities(self) -> dict[str, Identity]:
        """The certificates of `default` by the kinds of their keys."""
        return {pair.facts.kind: pair.identity for pair in _grouped(self.pairs)[0]}


def load(settings: TlsFiles, now: datetime) -> Loaded:
    """Read the files and make contexts of them. Blocks; for a thread, once the loop runs.

    Raises:
        StartError: one is missing or wrong; one sentence that names it.
    """
    try:
        pairs = [_read_pair(*pair, settings.key_password) for pair in settings.pairs]
        trust = _read_trust(settings, now)
        return made(settings, pairs, trust)
    except OSError as error:  # no file descriptor left
        fault = f"cannot read the certificates: {error.strerror or error}"
    except StartError as error:
        fault = str(error)
    raise StartError(f"{settings.what}: {fault}" if settings.what else fault)


def check(settings: TlsFiles, now: datetime) -> None:
    """Read the files as `load` does; without a pair only those that clients are checked against. Raises as `load`."""
    if settings.pairs:
        load(settings, now)
        return
    try:
        _read_trust(settings, now)
    except StartError as error:
        raise StartError(f"{settings.what}: {error}" if settings.what else str(error)) from None


def made(settings: TlsFiles, pairs: Sequence[Pair], trust: Trust) -> Loaded:
    """Contexts of what was read.

    Raises:
        OSError: there is no file descriptor left.
        StartError: OpenSSL does not take it.
    """
    groups = _grouped(pairs)
    contexts = [_context(settings, group, trust) for group in groups]
    names: dict[str, ssl.SSLContext] = {}
    for group, context in zip(groups, contexts, strict=True):
        for name in group[0].facts.names:
            names.setdefault(name, context)  # of two certificates for a name, the first
    return Loaded(contexts[0], names, list(pairs), trust, (settings.mode, settings.minimum, settings.alpn))


def _grouped(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Certificates for the same names with keys of other kinds share a context: OpenSSL chooses what a client knows."""
    groups: list[list[Pair]] = []
    for pair in pairs:
        for group in groups:
            if group[0].facts.names == pair.facts.names and pair.facts.kind not in {one.facts.kind for one in group}:
                group.append(pair)
                break
        else:
            groups.append([pair])
    return groups


def _context(settings: TlsFiles, pairs: Sequence[Pair], trust: Trust) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if settings.minimum == "1.3" else ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = TICKETS
    if settings.alpn:
        context.set_alpn_protocols(list(settings.alpn))
    for pair in pairs:
        pair.identity.load_into(context)
    context.verify_mode = settings.mode
    if settings.mode is not ssl.CERT_NONE:
        _load_trust(context, trust)
    return context


def _load_trust(context: ssl.SSLContext, trust: Trust) -> None:
    with _as_file(trust.authorities + b"\n" + trust.lists) as path:
        context.load_verify_locations(cafile=path)  # this way OpenSSL reads lists too, and lets other threads run
    if trust.lists:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN


# ---- reading


def _read_pair(cert: str, key: str, password: str | None) -> Pair:
    chain, secret = _content(cert), _content(key)
    if password is None and any(mark in secret for mark in _ENCRYPTED):
        raise StartError(f"the private key {key} is protected by a password; give it as tls.key_password")
    try:
        identity = Identity(chain, secret, None if password is None else password.encode())
        leaf = x509.load_pem_x509_certificate(chain)
        names = host_names(leaf)
    except (ArgumentError, ValueError) as error:
        why = str(error).removeprefix("no certificate with its key: ").partition("; give PEM")[0]
        if "lib (" in why or "DECRYPT" in why:  # OpenSSL says no more than "PEM lib"
            why = "one is empty or damaged" + ("" if password is None else ", or tls.key_password is another")
        raise StartError(
            f"{cert} and {key} are no certificate with its key: {why}; give PEM files that belong together"
        ) from None
    except OSError as error:
        raise StartError(f"cannot read {cert}: {error.strerror}") from None
    subject = leaf.subject.rfc4514_string() or ", ".join(names)
    facts = Certificate(
        cert, subject, tuple(names), key_kind(leaf), leaf.not_valid_before_utc, leaf.not_valid_after_utc
    )
    return Pair(identity, facts, _trouble(key))


def _trouble(key: str) -> str:
    with suppress(OSError):
        if os.stat(key).st_mode & stat.S_IROTH:
            return f"everybody on this machine may read the private key {key}; chmod o= {key}"
    return ""


def _read_trust(settings: TlsFiles, now: datetime) -> Trust:
    if settings.client_ca is None:
        for setting in ("client_crl", "client_certificate"):
            if getattr(settings, setting) not in (None, "none"):
                raise StartError(f"{setting} needs client_ca: the authorities that clients are trusted by")
        return Trust()
    path = settings.client_ca
    authorities = _content(path)
    try:
        found = x509.load_pem_x509_certificates(authorities)
    except ValueError as error:
        raise StartError(f"cannot read the client authorities {path}: {_damage(error)}; give a PEM file") from None
    troubles = [f"an authority in {path} has expired: {_name(one.subject)}" for one in found if _is_over(one, now)]
    if settings.client_crl is None:
        return Trust(authorities, troubles=tuple(troubles))
    lists = _content(settings.client_crl)
    revoked = _lists(settings.client_crl, lists)
    until = min((one.next_update_utc for one in revoked if one.next_update_utc), default=None)
    covered = {one.issuer for one in revoked}
    troubles += [
        f"{settings.client_crl} has no list of {_name(one.subject)}: its clients are refused"
        for one in found
        if one.subject not in covered
    ]
    return Trust(authorities, lists, until, tuple(troubles))


def _lists(path: str, data: bytes) -> list[x509.CertificateRevocationList]:
    end = b"-----END X509 CRL-----"
    try:
        lists = [x509.load_pem_x509_crl(part + end) for part in data.split(end)[:-1]]
    except ValueError as error:
        raise StartError(f"cannot read the revocation lists {path}: {_damage(error)}; give a PEM file") from None
    if not lists:
        raise StartError(f"there is no revocation list in {path}; give a PEM file")
    return lists


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A name for data that is on no disk: ssl reads files only."""
    try:
        fd = os.memfd_create("trust")
    except OSError as error:
        raise StartError(f"cannot hold the certificates: {error.strerror}") from None
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    except (ssl.SSLError, OSError) as error:
        raise StartError(f"cannot take the client authorities: {_first(error)}") from None
    finally:
        os.close(fd)


def _is_over(certificate: x509.Certificate, now: datetime) -> bool:
    return certificate.not_valid_after_utc < now


def _first(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).partition("\n")[0].rstrip(".")


def _damage(error: ValueError) -> str:
    """What `cryptography` says in the words of its parser, or with an address of its manual."""
    return "there is nothing of the kind in it" if "MalformedFraming" in str(error) else "it is damaged"


def _name(name: x509.Name) -> str:
    return name.rfc4514_string()


def shown(moment: datetime) -> str:
    """A time of day as log lines have it."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")
