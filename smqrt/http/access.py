"""Access rules of a server: the Host names it answers to, the pages whose requests it takes, who is shown errors
(design: reliability §5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn, Protocol

from smqrt.errors import ArgumentError
from smqrt.http.headers import HttpError, completed
from smqrt.http.response import Response
from smqrt.settings.limit_register import Limit
from smqrt.transport.origins import Hosts, Origins, host_name, is_loopback, same_origin

# ---- Private files: what no client is shown though it lies in a folder that is served (design: reliability §5).
#
# Source code, keys, databases, settings, the journals of hubs and the code of pipelines. What begins with a dot is
# hidden
# everywhere, see `hidden`.

_SOURCES = (".lua", ".luac", ".py", ".pyc", ".pyo", ".pyw", ".lsp")
_KEYS = (".pem", ".key", ".p12", ".pfx")
_DATABASES = (".db", ".db3", ".sqlite", ".sqlite3", ".db-journal", ".sqlite-journal", ".sqlite3-journal")
_BESIDE_DATABASES = ("-wal", "-shm", "-lock")  # whatever the database is called
_RECORDS = (".arrow", ".arrows", ".parquet")
_PRIVATE = (*_SOURCES[:-1], *_KEYS, *_DATABASES, *_BESIDE_DATABASES, *_RECORDS)
_SETTINGS = frozenset(("smqrt.toml", "mako.conf"))
_BACKUPS = frozenset(("bak", "old", "orig", "rej", "save", "swp", "swo", "tmp"))  # endings that editors add
_INDEX = re.compile(r"[0-9]+\.idx")  # beside a segment of a journal
_PIPELINES, _PIPELINE = "/pipelines/", (".py", ".sql")
_JOURNAL = frozenset(("token", "hub.json", "manifest.json", "manifest", "wal", "data", "retired", "readers"))
_TRANSACTIONS = "txn"  # how a journal's lists of finished batches begin
MAGICS = (
    b"SQLite format 3\0",
    b"\x37\x7f\x06\x82",  # its write-ahead log
    b"\x37\x7f\x06\x83",
    b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7",  # its rollback journal
)
MAGIC_BYTES = 16


class Private:
    """Tells which files are private, by name and by what they begin with.

    Args:
        served: patterns of names that are served nevertheless, such as `*.py`; journals, pipelines and what is hidden
            are not opened by them.
    """

    def __init__(self, served: str | Iterable[str] = ()) -> None:
        words = served.split(",") if isinstance(served, str) else served
        self._served = tuple(word.strip().lower() for word in words if word.strip())

    def name(self, path: str) -> bool:
        """Return whether a path is private: absolute on a disk, relative to its top in an archive."""
        if _is_pipeline(f"/{path.lower()}") or (path.startswith("/") and _in_journal(path)):
            return True
        name = _plain(path)
        return not self._is_served(name) and _is_private(name)

    def content(self, path: str, beginning: bytes) -> bool:
        """Return whether a file that begins so is private under any name: databases may be called anything."""
        return beginning.startswith(MAGICS) and not self._is_served(_plain(path))

    def _is_served(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._served)


class NothingPrivate(Private):
    """For files that the server itself shows to whom it may."""

    def name(self, path: str) -> bool:
        """See `Private.name`."""
        return False

    def content(self, path: str, beginning: bytes) -> bool:
        """See `Private.content`."""
        return False


def disguised(name: str, real: str) -> bool:
    """Return whether a link shows something hidden, or a page's source, under another kind of name."""
    return hidden(real) > hidden(name) or (is_page(real) and not is_page(name))


def hidden(path: str) -> bool:
    """Return whether a path is closed to clients: it has a part that begins with a dot, or is an include file (spec:
    runtime §5.5)."""
    return "/." in path or path[:1] == "." or path[-6:].lower() == ".shtml"


def is_page(path: str) -> bool:
    """Return whether a path names a Lua Server Page, in any letter case."""
    return path[-4:].lower() == ".lsp"


def _plain(path: str) -> str:
    """The last part in lower case, without what some systems drop at its end."""
    return path.rpartition("/")[2].lower().partition("::$")[0].rstrip(". ")


def _is_private(name: str) -> bool:
    if name.endswith(_PRIVATE) or name in _SETTINGS or _INDEX.fullmatch(name) is not None:
        return True
    saved = _without_backup(name)
    return saved != name and (saved.endswith((*_SOURCES, *_PRIVATE)) or saved in _SETTINGS)


def _without_backup(name: str) -> str:
    """`page.lsp` for `page.lsp~`, `page.lsp.bak` and `page.lsp.~1~`."""
    stem, dot, end = name.rstrip("~").rpartition(".")
    is_backup = dot and (end in _BACKUPS or end.strip("~").isdecimal())
    return stem if is_backup else name.rstrip("~")


def _is_pipeline(path: str) -> bool:
    return path.endswith(_PIPELINE) and _PIPELINES in path


def _in_journal(path: str) -> bool:
    """Return whether an absolute path is inside a journal: `journal.path` may be a folder that no dot hides."""
    start = 1
    for part in path[1:].split("/"):
        if (part in _JOURNAL or part.startswith(_TRANSACTIONS)) and _is_journal(path[:start]):
            return True
        start += len(part) + 1
    return False


def _is_journal(folder: str) -> bool:
    if not os.path.isdir(folder + "wal"):  # the usual case: `glob` takes fifty times as long to see it
        return False
    return any(Path(folder, "wal").glob("*/lock"))


# ---- Cross-origin resource sharing: what a browser is told of the pages of other origins that may read an answer
# (Fetch
# standard, §3.2).

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
MAX_AGE_S = 600
_ASKS_FOR_METHOD, _ASKS_FOR_HEADERS = "access-control-request-method", "access-control-request-headers"
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_ALLOWS = re.compile(rb"^access-control-allow-origin:", re.IGNORECASE | re.MULTILINE)
_VARY = re.compile(rb"^vary:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_ORIGIN_FIELD, _CREDENTIALS = "Access-Control-Allow-Origin", "Access-Control-Allow-Credentials"


class CorsRequest(Protocol):
    """What the rules look at: see `smqrt.http.message.Request`."""

    method: str
    response: Response

    def get(self, name: str) -> str | None:
        """A header field, None without it."""


class Cors:
    """The rules of a directory, or of the whole server.

    Args:
        origins: whose pages may send and read, see `Origins`; None for those of the setting `origins`.
        methods: that they may use, an iterable or a text with commas; None for every method.
        headers: that they may send; None for every header.
        expose: headers of answers that their scripts may read, beside those that every script may.
        credentials: whether they may send cookies and logins and read what is answered then. None for those that
            `origins` names; pages of `*` and `null` never may.
        max_age_s: seconds that a browser may keep the answer to a preflight.

    Raises:
        ArgumentError: one of them is wrong.
    """

    def __init__(
        self,
        origins: str | Iterable[str] | Origins | None = None,
        *,
        methods: str | Iterable[str] | None = None,
        headers: str | Iterable[str] | None = None,
        expose: str | Iterable[str] = (),
        credentials: bool | None = None,
        max_age_s: int = MAX_AGE_S,
    ) -> None:
        self.origins = origins if isinstance(origins, Origins | None) else Origins(origins)
        self._methods = None if methods is None else _tokens("methods", methods)
        self._headers = None if headers is None else _tokens("headers", headers)
        exposed = ", ".join(_tokens("expose", expose))
        self._expose = {"Access-Control-Expose-Headers": exposed} if exposed else {}
        if isinstance(max_age_s, bool) or not isinstance(max_age_s, int) or not 0 <= max_age_s < 1 << 31:
            raise ArgumentError(f"max_age: whole seconds are needed, 0 or more, not {max_age_s!r}")
        self._max_age_s = max_age_s
        if credentials and self.origins is not None and self.origins.all:
            raise ArgumentError("credentials: pages of every origin (`*`) can't have them; name the origins")
        self._credentials = credentials is not False

    def say(self, request: CorsRequest, origins: Origins) -> bool:
        """Have the answer to a request say which page may read it; return whether the page that has sent it may.

        Args:
            origins: those of the server, or of the hub that is asked.
        """
        listed = self.origins if self.origins is not None else origins
        origin = request.get("origin")
        allowed = self._allowed(listed, origin)
        if allowed or listed.differ:
            request.response.finishers += (Finisher(allowed | self._expose if allowed else {}, listed.differ),)
        return bool(allowed) and origin is not None

    def takes(self, method: str) -> bool:
        """Return whether pages of other hosts may use a method."""
        return self._methods is None or method in self._methods

    def _allowed(self, origins: Origins, origin: str | None) -> dict[str, str]:
        """The fields that let a page of `origin` read; empty when it may not."""
        if origin is not None and origins.names(origin):
            return {_ORIGIN_FIELD: origin} | ({_CREDENTIALS: "true"} if self._credentials else {})
        if origins.all:
            return {_ORIGIN_FIELD: "*"}
        if origin is not None and origins.has(origin):
            return {_ORIGIN_FIELD: "null"}  # any page can have this origin: no credentials
        return {}

    def answer_preflight(self, request: CorsRequest) -> None:
        """Say what a page may send that may read the answers. Raises as `Response.end`."""
        method = request.get(_ASKS_FOR_METHOD) or ""
        methods = self._methods
        if methods is None:
            methods = METHODS if method in METHODS or not _TOKEN.fullmatch(method) else (*METHODS, method)
        headers = self._headers
        if headers is None:
            asked = (request.get(_ASKS_FOR_HEADERS) or "").split(",")
            headers = tuple(name.strip() for name in asked if _TOKEN.fullmatch(name.strip()))
        response = request.response
        response.status = 204
        response.headers.set("Access-Control-Allow-Methods", ", ".join(methods))
        if headers:
            response.headers.set("Access-Control-Allow-Headers", ", ".join(headers))
        response.headers.set("Access-Control-Max-Age", str(self._max_age_s))
        response.headers.set("Vary", "Access-Control-Request-Method, Access-Control-Request-Headers")
        response.end()


class Finisher:
    """Adds fields to the head of an answer, whoever answers; not to one whose application says itself who may read."""

    def __init__(self, fields: dict[str, str], differs: bool) -> None:
        self._fields, self._differs = fields, differs

    def __call__(self, lines: bytes) -> bytes:
        """Return the header lines with those that are missing."""
        if _ALLOWS.search(lines):
            return lines
        return completed(_varied(lines) if self._differs else lines, self._fields)


def is_preflight(request: CorsRequest) -> bool:
    """Return whether a browser asks what a page of another origin may send."""
    return request.method == "OPTIONS" and None not in (request.get("origin"), request.get(_ASKS_FOR_METHOD))


def wanted_method(request: CorsRequest) -> str:
    """The method that a preflight is about."""
    return request.get(_ASKS_FOR_METHOD) or ""


def _varied(fields: bytes) -> bytes:
    """`fields` with Origin in its first Vary line (RFC 9110 §12.5.5)."""
    lines = _VARY.findall(fields)
    if not lines:
        return fields + b"Vary: Origin\r\n"
    names = {name.strip().lower() for line in lines for name in line.split(b",")}
    if b"origin" in names or b"*" in names:
        return fields
    return _VARY.sub(lambda line: b"Vary: " + b", ".join(filter(None, (line[1].rstrip(), b"Origin"))), fields, count=1)


def _tokens(what: str, names: str | Iterable[str]) -> tuple[str, ...]:
    listed = names.split(",") if isinstance(names, str) else list(names)
    for name in listed:
        if not isinstance(name, str) or (name.strip() and _TOKEN.fullmatch(name.strip()) is None):
            raise ArgumentError(f"{what}: {name!r} is no name; write them with commas between, such as X-Name, Accept")
    return tuple(name.strip() for name in listed if name.strip())


_SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
_FORWARDED = frozenset(("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"))
_MAX_KNOWN = 1024
_SHOWN = 255  # characters; no name has more

ORIGINS = Limit("origins", "origins", "pages of other origins may not do this")
HOSTS = Limit("hosts", "hosts", "the server does not answer to that name")


class CheckedRequest(CorsRequest, Protocol):
    """What the rules look at: see `smqrt.http.message.Request`."""

    cors: Cors | None
    path: str
    host: str
    secure: bool

    @property
    def local(self) -> tuple[str, int]:
        """Address and port the client connected to."""

    def has_any(self, names: frozenset[str]) -> bool:
        """Return whether a header field of these names is there."""


class Access:
    """What a server asks of every request.

    Args:
        origins: pages of other hosts that are welcome.
        hosts: the names it answers to; none are every name, on loopback the names of loopback only.
        loopback: whether it listens on loopback only: a page of the web that has its own name point to 127.0.0.1 (DNS
            rebinding) sends that name as Host.
        debug: whether clients see tracebacks; None for those of this machine, when it listens on loopback.
    """

    def __init__(
        self,
        origins: Origins | None = None,
        hosts: Hosts | None = None,
        loopback: bool = False,
        debug: bool | None = False,
    ) -> None:
        self._origins = origins or Origins()
        self._cors = Cors()
        self._hosts = hosts or Hosts()
        self._loopback = loopback
        self._debug = debug
        self._any_host = self._hosts.all or not (self._hosts or loopback)
        self._known: set[str] = set()  # Host headers that were found good

    def check(self, request: CheckedRequest) -> bool:
        """Reject a request for another host, and one that changes something for a page of another host. Browsers are
        told which pages may read the answer.

        Returns:
            whether the request has been answered: it was a browser's, that asked what a page may send.

        Raises:
            HttpError: 403.
        """
        is_allowed = False
        if self._origins or request.cors is not None:
            is_allowed = self._rules(request).say(request, self._origins)
        if request.host not in self._known and not self._any_host:
            self._check_host(request)
        if request.method not in _SAFE:
            self.check_origin(request)
        return request.method == "OPTIONS" and is_preflight(request) and self._answers(request, is_allowed)

    def check_origin(self, request: CheckedRequest, more: Origins | None = None) -> None:
        """Reject a request of a page of another host that is in no list; one without an Origin is not from a page.

        Args:
            request: the request.
            more: what is welcome beside the server's own list.

        Raises:
            HttpError: 403.
        """
        origin = request.get("origin")
        if origin is None or self._welcome(request, origin):
            return
        if more is not None and more.has(origin):
            self._cors.say(request, more)
            return
        what = f"of a page of {origin[:_SHOWN]!r} for {(request.get('host') or '')[:_SHOWN]!r}"
        setting, where = f"origins={origin}", "the setting is `origins`"
        if self._listed(request).has(origin):
            setting = f"methods={request.method}"
        if request.cors is not None:
            setting, where = f"{setting} in setcors of the application", "the application's `setcors` says who may"
        self._refuse(request, ORIGINS, what, setting, f"Pages of other origins may not do this; {where}.")

    def shows_errors(self, request: CheckedRequest) -> bool:
        """Return whether the client may see what went wrong inside the server."""
        if self._debug is not None:
            return self._debug
        at_home = self._loopback and _is_local(request) and is_loopback(host_name(request.get("host") or ""))
        return at_home and not request.has_any(_FORWARDED)

    def _rules(self, request: CheckedRequest) -> Cors:
        return self._cors if request.cors is None else request.cors

    def _listed(self, request: CheckedRequest) -> Origins:
        own = self._rules(request).origins
        return self._origins if own is None else own

    def _welcome(self, request: CheckedRequest, origin: str) -> bool:
        if same_origin(origin, request.get("host") or "", request.secure):
            return True
        may_use = request.method in _SAFE or self._rules(request).takes(request.method)
        return may_use and self._listed(request).has(origin)

    def _answers(self, request: CheckedRequest, is_allowed: bool) -> bool:
        """Answer a preflight of a page that may send; refuse one of a page that may not, unless nobody may by our rules
        and only reads: then the application may have rules of its own."""
        if is_allowed:
            self._rules(request).answer_preflight(request)
        elif self._listed(request) or wanted_method(request) not in _SAFE:
            self.check_origin(request)
        return is_allowed

    def _check_host(self, request: CheckedRequest) -> None:
        host = request.get("host")
        name = host_name(host or "")
        if host is None or is_loopback(name) or self._hosts.has(name):
            if host is not None and len(host) <= _SHOWN and len(self._known) < _MAX_KNOWN:
                self._known.add(host)
        elif self._hosts or _is_local(request):
            what = f"for the host {host[:_SHOWN]!r}"
            self._refuse(
                request,
                HOSTS,
                what,
                f"hosts={name}",
                "This server does not answer to that name; the setting is `hosts`.",
            )

    def _refuse(self, request: CheckedRequest, limit: Limit, what: str, setting: str, sentence: str) -> NoReturn:
        asked = f"{request.method} {request.path[:_SHOWN]!r}"
        limit.refused(f"{asked} {what}", f"to allow it, set {ascii(setting[:_SHOWN])[1:-1]}")
        raise HttpError(403, sentence)


def _is_local(request: CheckedRequest) -> bool:
    """Return whether it came to an address of loopback."""
    address = ip_address(request.local[0].partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
