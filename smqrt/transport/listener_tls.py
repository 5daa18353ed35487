"""The TLS of a listener while it runs: which context the next handshake gets, and what an operator is told of it."""

from __future__ import annotations

import _ssl
import contextlib
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any
from weakref import WeakSet

from gevent.lock import BoundedSemaphore

from smqrt.errors import ArgumentError, StartError
from smqrt.loop.disk_threads import DiskThreads
from smqrt.transport.server_tls import KEYS_LAST, Certificate, Loaded, TlsFiles, load, made, shown
from smqrt.transport.tls import ACME_PROTOCOL

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
