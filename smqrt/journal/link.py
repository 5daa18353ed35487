"""Requests to a hub: one connection that is kept, and patience while the hub is away."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from smqrt.errors import JournalError

TIMEOUT_S = 30.0
ANSWER_BYTES = 256 << 20
"""More than any piece of a journal that is asked for."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_BEGIN = "-----BEGIN"
MOVED = "was moved, removed or unmounted; bring it back."
"""What is told of a journal's folder that isn't there any more."""
_AWAY = (429, 502, 503, 504)


class Address(NamedTuple):
    """Where a journal is served, the token for it, and whom to trust there: PEM text; None for the system's."""

    url: str
    token: str
    trusted: str | None = None


class Answer(NamedTuple):
    """What the hub said; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Refused(JournalError):
    """The hub said no.

    Args:
        status: of HTTP.
        sentence: why.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Unreachable(JournalError):
    """The hub is away, and has been for as long as somebody was willing to wait."""


class _Away(Exception):
    """The hub can't be asked now; later perhaps."""


def checked(url: str) -> str:
    """Returns the address of a journal on a hub.

    Raises:
        JournalError: it isn't one.
    """
    parts = urlsplit(url)
    try:
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.path.strip("/")
    except ValueError:
        right = False
    if not right:
        raise JournalError(
            f"{url} is no address of a journal; it's like http://127.0.0.1:9357/rtl/journal/NAME, as in its hub.json."
        )
    return url.rstrip("/")


def trusted(cafile: str | None) -> str | None:
    """Returns certificates to trust, as text, so that others need no such file.

    Args:
        cafile: a PEM file, or what it holds.

    Raises:
        JournalError: it can't be read, or holds none.
    """
    if cafile is None:
        return None
    try:
        text = cafile if cafile.startswith(_BEGIN) else Path(cafile).read_text("ascii")
        ssl.create_default_context(cadata=text or "nothing")  # "" stands for the system's
    except (OSError, ValueError) as error:
        raise JournalError(f"cafile {cafile[:200]} is no PEM file with certificates: {error}.") from None
    return text


class Link:
    """A connection to where a journal is served. Threads may share it; they take turns.

    Args:
        find: gives the address; it's asked again after every failure, for a hub may come back elsewhere. It raises
            `JournalError` when there is none.
        retry_s: how long a request is repeated while the hub is away, seconds; 0: it's tried once.
    """

    def __init__(self, find: Callable[[], Address], retry_s: float) -> None:
        self.retry_s = retry_s
        self._find = find
        self._lock = threading.Lock()
        self._open: tuple[Address, http.client.HTTPConnection] | None = None

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        """Returns what the hub says to a GET of a path below the journal's address.

        Raises:
            Refused: it said no.
            JournalError: the token is wrong, or the hub is away for too long.
        """
        return self._repeat("GET", path, None, headers or {})

    def post(self, path: str, body: bytes, again: bool = True) -> Answer:
        """Returns what the hub says to a POST.

        Args:
            path: below the journal's address.
            body: what is sent.
            again: it may be sent twice. If not, it's repeated only while no connection can be made.

        Raises:
            Refused, JournalError: as `get`.
        """
        return self._repeat("POST", path, body, {"Content-Type": "application/octet-stream"}, again)

    def close(self) -> None:
        """Closes the connection; the next request makes another."""
        opened, self._open = self._open, None
        if opened:
            opened[1].close()

    def _repeat(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], again: bool = True
    ) -> Answer:
        deadline, pause_s = time.monotonic() + self.retry_s, _FIRST_PAUSE_S
        with self._lock:
            while True:
                try:
                    return self._once(method, path, body, headers, again)
                except _Away as away:
                    self.close()
                    if time.monotonic() + pause_s > deadline:
                        raise self._given_up(away) from away.__cause__
                except JournalError:
                    self.close()
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _given_up(self, why: _Away) -> Unreachable:
        patience = f"for {self.retry_s:g} s " if self.retry_s else ""
        return Unreachable(f"The hub hasn't answered {patience}({why}); start it with `smqrt serve`, then try again.")

    def _once(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], again: bool) -> Answer:
        kept = self._open is not None and again
        if not kept:
            self.close()
        address, connection = self._open or self._connected()
        try:
            answer = _exchange(address, connection, method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not again:
                raise JournalError(
                    f"The hub went away while it was told something ({error!r}); whether it took it is not known."
                ) from error
            if kept:  # it's no failure that the hub had closed a connection that was idle
                return self._once(method, path, body, headers, again)
            raise _Away(f"{address.url}: {error!r}") from error
        return _judged(answer, f"{address.url}/{path}")

    def _connected(self) -> tuple[Address, http.client.HTTPConnection]:
        try:
            address = self._find()
        except JournalError as error:
            raise _Away(str(error).rstrip(".")) from error
        connection = _connection(urlsplit(address.url), address.trusted)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise JournalError(
                f"{address.url}: its certificate can't be trusted ({error.verify_message}); name the file with the "
                "certificate of its authority: --cafile, or cafile= in Python and as an option."
            ) from None
        except OSError as error:
            raise _Away(f"{address.url}: {error}") from error
        self._open = address, connection
        return self._open


def _exchange(
    address: Address,
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
) -> Answer:
    sent = {"Authorization": f"Bearer {address.token}", **headers}
    connection.request(method, f"{urlsplit(address.url).path}/{path}", body, sent)
    with connection.getresponse() as response:
        names = {name.lower(): value for name, value in response.getheaders()}
        body = response.read(ANSWER_BYTES + 1)
        if len(body) > ANSWER_BYTES:
            raise JournalError(f"{address.url}/{path}: the answer has more than {ANSWER_BYTES} bytes, as none has.")
        if response.length:  # it ended early, which http.client says only of whole reads
            raise http.client.IncompleteRead(body, response.length)
        return Answer(response.status, names, body)


def _judged(answer: Answer, url: str) -> Answer:
    sentence = answer.body[:500].decode("utf-8", "replace").strip()
    if answer.status in _AWAY:
        raise _Away(sentence or f"{url}: {answer.status}")
    if answer.status == 403:  # the token is one, and lacks a right, which the hub names
        raise JournalError(f"{url}: {sentence or 'the hub says 403.'}")
    if answer.status == 401:
        raise JournalError(f"{url}: wrong token: it must be what the file `token` in the journal's folder holds.")
    if answer.status >= 400:
        raise Refused(answer.status, sentence or f"{url}: the hub says {answer.status}.")
    if answer.status >= 300 and answer.status != 304:
        raise Refused(answer.status, f"{url} answers {answer.status}, as no journal of a hub does.")
    return answer


def _connection(parts: SplitResult, trusted: str | None) -> http.client.HTTPConnection:
    if parts.scheme != "https":
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    context = ssl.create_default_context(cadata=trusted)
    return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S, context=context)
