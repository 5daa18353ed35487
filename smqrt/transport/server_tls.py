"""TLS of listeners: certificates by server name, client certificates, revocation lists, reload.

OpenSSL selects the certificate when a handshake begins, so new files affect only later handshakes. Client authorities
and revocation lists never change inside a context: an `SSLContext` cannot remove authorities, and sessions that it
resumes are not verified again. A change of these creates new contexts, which do not resume older sessions. A new server
certificate alone is loaded into the current context, so that its session tickets stay valid.
"""

from __future__ import annotations

import _ssl
import logging
import os
import ssl
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
from smqrt.transport.tls import ACME_PROTOCOL
from smqrt.transport.tls_contexts import NO_PAIR, Identity, host_names, key_kind

# ---- TLS of a running listener: the context of the next handshake, and warnings for operators.

log = logging.getLogger("smqrt")

_threads = DiskThreads("of the certificates")
# The standard library's descriptor: gevent's, which `smqrt serve` patches in, supports only gevent's sockets.
_sni_callback: Any = _ssl._SSLContext.sni_callback
_message_callback: Any = _ssl._SSLContext._msg_callback  # type: ignore[attr-defined]  # the only access to a ClientHello
_CLIENT_HELLO = 1
_OFFERS_ACME = bytes([len(ACME_PROTOCOL)]) + ACME_PROTOCOL.encode()  # an entry of the ALPN extension (RFC 7301 §3.1)


def _now() -> datetime:
    return datetime.now(UTC)


class ListenerTls:
    """The TLS files of a listener: loaded when it is created, and again by `reload`.

    Args:
        files: the files and the TLS options.
        clock: returns the current time.

    Attributes:
        context: the context of the next handshake.
        fault: the reason why the last reload failed; None after a success.
        reloads, failures: number of successful and failed reloads.

    Raises:
        StartError: a file is missing or wrong; one sentence that names it.
    """

    def __init__(self, files: TlsFiles, clock: Callable[[], datetime] = _now) -> None:
        self.tls_files = files
        self._clock = clock
        self._warned: dict[str, str | int] = {}
        self._reload_lock = BoundedSemaphore()
        self._challenges: Mapping[str, ssl.SSLContext] = {}
        self._offers_acme: WeakSet[ssl.SSLObject] = WeakSet()  # weak: entries disappear with their handshakes
        self._loaded = load(files, clock())
        self.fault: str | None = None
        self.reloads = self.failures = 0
        self._context_since = self.read_at = clock()
        self.context = self._loaded.default
        self._set_callbacks(self._loaded)
        self._log_warnings(self._loaded.warnings)
        self.check_expiry()

    @property
    def files(self) -> list[str]:
        """The paths of all files."""
        return self.tls_files.files

    @property
    def certificates(self) -> list[Certificate]:
        """The certificates in use."""
        return self._loaded.certificates

    def reload(self, in_thread: bool = True) -> str | None:
        """Read the files again. Invalid files change nothing.

        Args:
            in_thread: block only this greenlet, not the loop.

        Returns:
            The reason when they were rejected; None when they are in use.
        """
        if not in_thread:
            return self._reload(load)
        with self._reload_lock:  # otherwise the older of two reloads could finish last
            return self._reload(partial(_threads.call, load))

    def _reload(self, read: Callable[[TlsFiles, datetime], Loaded]) -> str | None:
        try:
            loaded = read(self.tls_files, self._clock())
            self.fault = self._rejection(loaded)
        except (StartError, TimeoutError) as error:
            self.fault = str(error)
        if self.fault is None:
            self.reloads += 1
            self.read_at = self._clock()
            if not self._load_into_current(loaded):
                self.context, self._context_since = loaded.default, self._clock()
            self._set_callbacks(loaded)
            self._loaded = loaded
            self._warned.clear()
            self._log_warnings(loaded.warnings)
            self.check_expiry()
        else:
            self.failures += 1
        return self.fault

    def change(self, files: TlsFiles) -> None:
        """Use other files or TLS options for later handshakes; blocks this greenlet.

        Raises:
            StartError: the files are invalid; the former ones stay in use.
        """
        if files == self.tls_files:
            return
        before, self.tls_files = self.tls_files, files
        if fault := self.reload():
            self.tls_files = before
            raise StartError(fault)

    def _rejection(self, loaded: Loaded) -> str | None:
        """Return the reason to reject new files: an expired file never replaces a valid one."""
        now = self._clock()
        before = {one.path: one.invalid_reason(now) for one in self.certificates}
        for one in loaded.certificates:
            reason = one.invalid_reason(now)
            if reason and before.get(one.path, reason) is None:  # a new path is not compared
                return f"{reason}; the one in use is valid"
        old, new = self._loaded.trust.until, loaded.trust.until
        if new and new < now and old and old >= now:
            return f"the revocation list {self.tls_files.client_crl} has expired; the one in use is valid"
        return None

    def _load_into_current(self, loaded: Loaded) -> bool:
        """Load new certificates into the current context, which keeps its tickets valid; return False if impossible."""
        new, old = loaded.default_identities, self._loaded.default_identities
        if loaded.trust != self._loaded.trust or loaded.options != self._loaded.options or new.keys() != old.keys():
            return False
        try:
            for identity in new.values():
                identity.load_into(self.context)
        except (OSError, ArgumentError):  # no file descriptor left, perhaps for the second: the new context is used
            return False
        loaded.names = {name: self.context if one is loaded.default else one for name, one in loaded.names.items()}
        loaded.default = self.context
        return True

    def _set_callbacks(self, loaded: Loaded) -> None:
        has_names = len(set(loaded.names.values()) | {loaded.default}) > 1
        has_challenges = bool(self._challenges)
        # A callback costs time in each handshake, so it is set only when it is needed.
        _sni_callback.__set__(loaded.default, self._choose_context if has_names or has_challenges else None)
        _message_callback.__set__(loaded.default, self._note_acme_offer if has_challenges else None)

    def answer_challenges(self, contexts: Mapping[str, ssl.SSLContext]) -> None:
        """Use these contexts, by server name, for handshakes that offer `ACME_PROTOCOL`; empty to stop."""
        self._challenges = contexts
        self._set_callbacks(self._loaded)

    def _note_acme_offer(self, client: ssl.SSLObject, direction: str, *message: Any) -> None:
        """Handle a handshake message: version, content type, message type, data.

        Runs before `_choose_context`, because Python does not give that callback the protocols a client offers.
        """
        if message[2] == _CLIENT_HELLO and direction == "read" and _OFFERS_ACME in message[3]:
            self._offers_acme.add(client)

    def _choose_context(self, client: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        if not name:
            return
        name = name.lower()
        challenge = self._challenges.get(name) if client in self._offers_acme else None
        if challenge is not None:
            client.context = challenge
            return
        names = self._loaded.names
        found = names.get(name) or names.get("*." + name.partition(".")[2])
        if found is not None and found is not client.context:
            client.context = found

    def check_expiry(self) -> None:
        """Log certificates and lists that expire, and replace the ticket keys once a day."""
        now = self._clock()
        for certificate in self.certificates:
            days, reason = certificate.warning_days(now), certificate.invalid_reason(now)
            if reason:
                self._warn_once(certificate.path, reason, reason)
            elif days is not None:
                left = "a day" if days == 1 else f"{days} days"
                line = f"the certificate {certificate.path} expires within {left}, at {shown(certificate.not_after)}"
                self._warn_once(certificate.path, days, line)
        until = self._loaded.trust.until
        if until and until < now:
            line = f"the revocation list {self.tls_files.client_crl} expired at {shown(until)}"
            self._warn_once("list", True, f"{line}: clients with a certificate are rejected until there is a new one")
        list_expired = until is not None and self._context_since < until <= now
        if now - self._context_since > TICKET_KEY_LIFETIME or list_expired:  # new contexts do not resume older sessions
            with suppress(OSError, StartError):  # no file descriptor left: the next call tries again
                fresh = build_contexts(self.tls_files, self._loaded.pairs, self._loaded.trust)
                self.context, self._context_since, self._loaded = fresh.default, now, fresh
                self._set_callbacks(fresh)

    def _warn_once(self, what: str, state: str | int, line: str) -> None:
        if self._warned.get(what) != state:
            self._warned[what] = state
            self._log_warnings([line])

    def _log_warnings(self, lines: Iterable[str]) -> None:
        for line in lines:
            log.warning("%s: %s", self.tls_files.what or "TLS", line)

    def snapshot(self) -> dict[str, object]:
        """Return the state for the operations API, as JSON values; times in Unix seconds."""
        until = self._loaded.trust.until
        return {
            "certificates": [
                {
                    "file": one.path,
                    "subject": one.subject,
                    "names": list(one.names),
                    "key": one.kind,
                    "not_before_s": one.not_before.timestamp(),
                    "not_after_s": one.not_after.timestamp(),
                }
                for one in self.certificates
            ],
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


TICKETS = 1
"""Tickets for each handshake of TLS 1.3. A client needs one to reconnect; OpenSSL's default of two costs 6 % more."""
TICKET_KEY_LIFETIME = timedelta(days=1)
"""Lifetime of a key that encrypts tickets: a stolen key reveals at most a day of TLS 1.2 sessions."""
WARN_DAYS = (30, 7, 1)
"""Days before the expiry of a certificate at which to warn."""
_ENCRYPTED = (b"-----BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED")
_MIN_LIFETIME_FACTOR = 3
"""A warning N days before the expiry needs a lifetime of this many times N days: no warning for short-lived ones."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files and TLS options of a listener.

    Attributes:
        pairs: files with a certificate chain and with its private key; the first pair is for clients that send no
            server name, or an unknown one.
        client_ca: file with the authorities of client certificates.
        client_crl: file with their revocation lists.
        client_certificate: "none", "optional" or "required"; None means "optional" when there is a `client_ca`.
        minimum: "1.2" or "1.3".
        alpn: the protocols of the listener, the preferred first; empty for no ALPN.
        what: the name of the listener in error messages, such as "listener.main"; empty for the only one.
        key_password: the password of encrypted private keys.
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
        """Whether to request a certificate from clients."""
        if self.client_certificate is None:
            return ssl.CERT_OPTIONAL if self.client_ca else ssl.CERT_NONE
        return {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}[
            self.client_certificate
        ]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Description of a server's certificate for operators.

    Attributes:
        path: path of the file.
        subject: the subject, such as "CN=example.com".
        names: the server names that it is valid for.
        kind: the kind of the key: "RSA", "EC" ...
        not_before, not_after: the period of validity.
    """

    path: str
    subject: str
    names: tuple[str, ...]
    kind: str
    not_before: datetime
    not_after: datetime

    def invalid_reason(self, now: datetime) -> str | None:
        """Return the reason why it is not valid at that time; None when it is valid."""
        if now > self.not_after:
            return f"the certificate {self.path} expired at {shown(self.not_after)}"
        if now < self.not_before:
            return f"the certificate {self.path} is not valid before {shown(self.not_before)}"
        return None

    def warning_days(self, now: datetime) -> int | None:
        """Return the smallest of `WARN_DAYS` that is not below the days left; None when more are left."""
        lifetime, left = self.not_after - self.not_before, self.not_after - now
        reached = (days for days in WARN_DAYS if left <= timedelta(days))
        return min((days for days in reached if lifetime >= _MIN_LIFETIME_FACTOR * timedelta(days)), default=None)


@dataclass(slots=True)
class Pair:
    """A certificate with its key, and its description.

    Attributes:
        warning: a warning about the key; empty for none.
    """

    identity: Identity
    facts: Certificate
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Trust:
    """Authorities and revocation lists for client certificates.

    Attributes:
        authorities, lists: the content of the files.
        until: the earliest expiry of the revocation lists.
        warnings: warnings about files that are used nevertheless.
    """

    authorities: bytes = b""
    lists: bytes = b""
    until: datetime | None = field(default=None, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)


@dataclass(slots=True)
class Loaded:
    """The valid content of a listener's files.

    Attributes:
        default: the context for clients that send no server name, or an unknown one.
        names: contexts by server name; `*.example.com` is for all names one level below.
        pairs: in the order of the settings.
        trust: authorities and revocation lists for client certificates.
        options: the settings other than files.
    """

    default: ssl.SSLContext
    names: dict[str, ssl.SSLContext]
    pairs: list[Pair]
    trust: Trust
    options: tuple[ssl.VerifyMode, str, tuple[str, ...]]

    @property
    def certificates(self) -> list[Certificate]:
        """Descriptions of the certificates."""
        return [pair.facts for pair in self.pairs]

    @property
    def warnings(self) -> list[str]:
        """Warnings about files that are used nevertheless."""
        return [*filter(None, (pair.warning for pair in self.pairs)), *self.trust.warnings]

    @property
    def default_identities(self) -> dict[str, Identity]:
        """The certificates of `default` by kind of key."""
        return {pair.facts.kind: pair.identity for pair in _grouped(self.pairs)[0]}


def load(settings: TlsFiles, now: datetime) -> Loaded:
    """Read the files and create contexts. Blocks: call it in a thread once the loop runs.

    Raises:
        StartError: a file is missing or wrong; one sentence that names it.
    """
    try:
        pairs = [_read_pair(*pair, settings.key_password) for pair in settings.pairs]
        trust = _read_trust(settings, now)
        return build_contexts(settings, pairs, trust)
    except OSError as error:  # no file descriptor left
        fault = f"cannot read the certificates: {error.strerror or error}"
    except StartError as error:
        fault = str(error)
    raise StartError(f"{settings.what}: {fault}" if settings.what else fault)


def check(settings: TlsFiles, now: datetime) -> None:
    """Check the files as `load` does; without a pair only those for client certificates. Raises as `load`."""
    if settings.pairs:
        load(settings, now)
        return
    try:
        _read_trust(settings, now)
    except StartError as error:
        raise StartError(f"{settings.what}: {error}" if settings.what else str(error)) from None


def build_contexts(settings: TlsFiles, pairs: Sequence[Pair], trust: Trust) -> Loaded:
    """Create contexts from the content of the files.

    Raises:
        OSError: there is no file descriptor left.
        StartError: OpenSSL rejects the content.
    """
    groups = _grouped(pairs)
    contexts = [_context(settings, group, trust) for group in groups]
    names: dict[str, ssl.SSLContext] = {}
    for group, context in zip(groups, contexts, strict=True):
        for name in group[0].facts.names:
            names.setdefault(name, context)  # the first of several certificates for a name
    return Loaded(contexts[0], names, list(pairs), trust, (settings.mode, settings.minimum, settings.alpn))


def _grouped(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Group certificates for the same names with different kinds of keys: OpenSSL chooses by the client."""
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
    context.options |= ssl.OP_NO_RENEGOTIATION  # a client could cause expensive handshakes with small packets
    context.num_tickets = TICKETS
    if settings.alpn:
        context.set_alpn_protocols(list(settings.alpn))
    for pair in pairs:
        pair.identity.load_into(context)
    context.verify_mode = settings.mode
    if settings.mode is not ssl.CERT_NONE:
        try:
            fd = os.memfd_create("trust")
        except OSError as error:
            raise StartError(f"cannot create a file in memory: {error.strerror}") from None
        try:  # a file: `cadata` does not read lists and holds the interpreter lock
            os.write(fd, trust.authorities + b"\n" + trust.lists)
            context.load_verify_locations(cafile=f"/proc/self/fd/{fd}")
        except (ssl.SSLError, OSError) as error:
            reason = str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
            first_line = reason.partition("\n")[0].rstrip(".")
            raise StartError(f"cannot use the client authorities: {first_line}") from None
        finally:
            os.close(fd)
        if trust.lists:
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN
    return context


# ---- reading


def _read_pair(cert: str, key: str, password: str | None) -> Pair:
    chain, secret = _content(cert), _content(key)
    if password is None and any(mark in secret for mark in _ENCRYPTED):
        raise StartError(f"the private key {key} is encrypted; set its password as tls.key_password")
    try:
        identity = Identity(chain, secret, None if password is None else password.encode())
        leaf = x509.load_pem_x509_certificate(chain)
        names = host_names(leaf)
    except (ArgumentError, ValueError) as error:
        reason = str(error).removeprefix(f"{NO_PAIR}: ").partition("; give PEM")[0]
        if "lib (" in reason or "DECRYPT" in reason:  # OpenSSL's text is only "PEM lib"
            reason = "one is empty or damaged" + ("" if password is None else ", or tls.key_password is wrong")
        raise StartError(f"{cert} and {key} are {NO_PAIR}: {reason}; give PEM files that match") from None
    except OSError as error:
        raise StartError(f"cannot read {cert}: {error.strerror}") from None
    subject = leaf.subject.rfc4514_string() or ", ".join(names)
    facts = Certificate(
        cert, subject, tuple(names), key_kind(leaf), leaf.not_valid_before_utc, leaf.not_valid_after_utc
    )
    warning = ""
    with suppress(OSError):
        if os.stat(key).st_mode & stat.S_IROTH:
            warning = f"every user of this machine can read the private key {key}; chmod o= {key}"
    return Pair(identity, facts, warning)


def _read_trust(settings: TlsFiles, now: datetime) -> Trust:
    if settings.client_ca is None:
        for setting in ("client_crl", "client_certificate"):
            if getattr(settings, setting) not in (None, "none"):
                raise StartError(f"{setting} needs client_ca: the authorities of client certificates")
        return Trust()
    path = settings.client_ca
    authorities = _content(path)
    try:
        found = x509.load_pem_x509_certificates(authorities)
    except ValueError as error:
        raise StartError(f"cannot read the client authorities {path}: {_damage(error)}; give a PEM file") from None
    warnings = [
        f"an authority in {path} has expired: {one.subject.rfc4514_string()}"
        for one in found
        if one.not_valid_after_utc < now
    ]
    if settings.client_crl is None:
        return Trust(authorities, warnings=tuple(warnings))
    lists = _content(settings.client_crl)
    end = b"-----END X509 CRL-----"
    try:
        # `cryptography` loads only one list per call.
        revoked = [x509.load_pem_x509_crl(part + end) for part in lists.split(end)[:-1]]
    except ValueError as error:
        raise StartError(
            f"cannot read the revocation lists {settings.client_crl}: {_damage(error)}; give a PEM file"
        ) from None
    if not revoked:
        raise StartError(f"there is no revocation list in {settings.client_crl}; give a PEM file")
    until = min((one.next_update_utc for one in revoked if one.next_update_utc), default=None)
    covered = {one.issuer for one in revoked}
    warnings += [
        f"{settings.client_crl} has no list of {one.subject.rfc4514_string()}: its clients are rejected"
        for one in found
        if one.subject not in covered
    ]
    return Trust(authorities, lists, until, tuple(warnings))


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None


def _damage(error: ValueError) -> str:
    """Describe an error of `cryptography`, whose text is about its parser."""
    return "it contains none" if "MalformedFraming" in str(error) else "it is damaged"


def shown(moment: datetime) -> str:
    """Format a time for log lines."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")
