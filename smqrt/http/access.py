"""Access rules of an HTTP server.

Private files, cross-origin resource sharing (CORS), accepted Host names and origins, and which clients see error
details.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn, Protocol

from smqrt.errors import ArgumentError
from smqrt.http.headers import HttpError, with_missing_fields
from smqrt.http.response import Response
from smqrt.settings.limits import Limit
from smqrt.transport.origins import Hosts, Origins, host_name, is_loopback, same_origin

# ---- Private files: never sent to a client, although they are in a folder that is served.
#
# Source code, keys, databases, settings, the journals of hubs and the code of pipelines. Names that begin with a dot
# are hidden everywhere, see `hidden`.

_SOURCES = (".lua", ".luac", ".py", ".pyc", ".pyo", ".pyw", ".lsp")
_KEYS = (".pem", ".key", ".p12", ".pfx")
_DATABASES = (".db", ".db3", ".sqlite", ".sqlite3", ".db-journal", ".sqlite-journal", ".sqlite3-journal")
_DATABASE_COMPANIONS = ("-wal", "-shm", "-lock")  # appended to any name of a database
_DATA_FILES = (".arrow", ".arrows", ".parquet")
_PRIVATE = (*_SOURCES[:-1], *_KEYS, *_DATABASES, *_DATABASE_COMPANIONS, *_DATA_FILES)
_SETTINGS = frozenset(("smqrt.toml", "mako.conf"))
_BACKUPS = frozenset(("bak", "old", "orig", "rej", "save", "swp", "swo", "tmp"))  # extensions that editors add
_SEGMENT_INDEX = re.compile(r"[0-9]+\.idx")  # of a journal segment
_PIPELINE_FOLDER, _PIPELINE_FILES = "/pipelines/", (".py", ".sql")
_JOURNAL = frozenset(("token", "hub.json", "manifest.json", "manifest", "wal", "data", "retired", "readers"))
_TRANSACTION_PREFIX = "txn"  # of the files that list the finished batches of a journal
MAGICS = (
    b"SQLite format 3\0",
    b"\x37\x7f\x06\x82",  # SQLite write-ahead log
    b"\x37\x7f\x06\x83",
    b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7",  # SQLite rollback journal
)
MAGIC_BYTES = 16


class Private:
    """Rules for private files, by name and by their first bytes.

    Args:
        served: patterns of names that are served nevertheless, such as `*.py`. They do not apply to journals, pipelines
            and hidden names.
    """

    def __init__(self, served: str | Iterable[str] = ()) -> None:
        words = served.split(",") if isinstance(served, str) else served
        self._served = tuple(word.strip().lower() for word in words if word.strip())

    def is_private(self, path: str) -> bool:
        """Return whether a path is private. Paths on a disk are absolute; those in an archive begin at its top."""
        rooted = f"/{path.lower()}"
        is_pipeline = rooted.endswith(_PIPELINE_FILES) and _PIPELINE_FOLDER in rooted
        if is_pipeline or (path.startswith("/") and _in_journal(path)):
            return True
        name = _plain(path)
        if self._is_served(name):
            return False
        if name.endswith(_PRIVATE) or name in _SETTINGS or _SEGMENT_INDEX.fullmatch(name) is not None:
            return True
        original = name.rstrip("~")  # `page.lsp` for `page.lsp~`, `page.lsp.bak` and `page.lsp.~1~`
        stem, dot, extension = original.rpartition(".")
        if dot and (extension in _BACKUPS or extension.strip("~").isdecimal()):
            original = stem
        return original != name and (original.endswith((*_SOURCES, *_PRIVATE)) or original in _SETTINGS)

    def has_private_content(self, path: str, beginning: bytes) -> bool:
        """Return whether a file with these first bytes is private. Databases may have any name."""
        return beginning.startswith(MAGICS) and not self._is_served(_plain(path))

    def _is_served(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._served)


class NothingPrivate(Private):
    """Rules without private files, for files that the server itself provides."""

    def is_private(self, path: str) -> bool:
        """See `Private.is_private`."""
        return False

    def has_private_content(self, path: str, beginning: bytes) -> bool:
        """See `Private.has_private_content`."""
        return False


def disguised(name: str, real: str) -> bool:
    """Return whether a link publishes a hidden file, or the source of a page, under a name of another kind."""
    return hidden(real) > hidden(name) or (is_page(real) and not is_page(name))


def hidden(path: str) -> bool:
    """Return whether a path is hidden from clients: a part begins with a dot, or it is an include file.

    Source: spec: runtime §5.5.
    """
    return "/." in path or path[:1] == "." or path[-6:].lower() == ".shtml"


def is_page(path: str) -> bool:
    """Return whether a path names a Lua Server Page, in any letter case."""
    return path[-4:].lower() == ".lsp"


def _plain(path: str) -> str:
    """Return the last part in lower case, without the suffixes that some file systems ignore."""
    return path.rpartition("/")[2].lower().partition("::$")[0].rstrip(". ")


def _in_journal(path: str) -> bool:
    """Return whether an absolute path is inside a journal."""
    start = 1  # no folder name identifies a journal: the setting `journal.path` may be any folder
    for part in path[1:].split("/"):
        if part in _JOURNAL or part.startswith(_TRANSACTION_PREFIX):
            wal = path[:start] + "wal"
            # `isdir` first: it is false in the usual case, and 50 times faster than `glob`
            if os.path.isdir(wal) and any(Path(wal).glob("*/lock")):
                return True
        start += len(part) + 1
    return False


# ---- Cross-origin resource sharing: which pages of other origins may read a response (Fetch standard, §3.2).

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
MAX_AGE_S = 600
_REQUEST_METHOD, _REQUEST_HEADERS = "access-control-request-method", "access-control-request-headers"
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_ALLOW_ORIGIN_LINE = re.compile(rb"^access-control-allow-origin:", re.IGNORECASE | re.MULTILINE)
_VARY_LINE = re.compile(rb"^vary:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_ORIGIN_FIELD, _CREDENTIALS = "Access-Control-Allow-Origin", "Access-Control-Allow-Credentials"


class CorsRequest(Protocol):
    """The attributes of a request that `Cors` reads, see `smqrt.http.message.Request`."""

    method: str
    response: Response

    def get(self, name: str) -> str | None:
        """Return a header field, or None without it."""


class Cors:
    """CORS rules of a directory or of the whole server.

    Args:
        origins: origins whose pages may send requests and read responses, see `Origins`. None for the setting
            `origins`.
        methods: methods that these pages may use, an iterable or a comma-separated string. None for every method.
        headers: request headers that they may send. None for every header.
        expose: response headers that their scripts may read, besides those that every script may read.
        credentials: whether they may send cookies and logins and read the responses. None for the origins that
            `origins` names. Pages of `*` and `null` may not.
        max_age_s: seconds that a browser may cache the response to a preflight.

    Raises:
        ArgumentError: an argument is invalid.
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
            raise ArgumentError(f"max_age_s: use whole seconds, 0 or more, not {max_age_s!r}")
        self._max_age_s = max_age_s
        if credentials and self.origins is not None and self.origins.all:
            raise ArgumentError("credentials: not allowed for every origin (`*`); name the origins")
        self._credentials = credentials is not False

    def add_fields(self, request: CorsRequest, origins: Origins) -> bool:
        """Add the CORS fields to the response; return whether the page that sent the request may read it.

        Args:
            request: the request.
            origins: allowed origins of the server or of the requested hub, used if these rules name none.
        """
        allowed = self.origins if self.origins is not None else origins
        origin = request.get("origin")
        fields: dict[str, str] = {}
        if origin is not None and allowed.names(origin):
            fields = {_ORIGIN_FIELD: origin} | ({_CREDENTIALS: "true"} if self._credentials else {})
        elif allowed.all:
            fields = {_ORIGIN_FIELD: "*"}
        elif origin is not None and allowed.has(origin):
            fields = {_ORIGIN_FIELD: "null"}  # any page can have this origin: no credentials
        if fields or allowed.differ:
            finisher = CorsFinisher(fields | self._expose if fields else {}, allowed.differ)
            request.response.finishers += (finisher,)
        return bool(fields) and origin is not None

    def allows_method(self, method: str) -> bool:
        """Return whether pages of other origins may use a method."""
        return self._methods is None or method in self._methods

    def answer_preflight(self, request: CorsRequest) -> None:
        """Respond to a preflight of a page that is allowed. Raises as `Response.end`."""
        method = request.get(_REQUEST_METHOD) or ""
        methods = self._methods
        if methods is None:
            methods = METHODS if method in METHODS or not _TOKEN.fullmatch(method) else (*METHODS, method)
        headers = self._headers
        if headers is None:
            requested = (request.get(_REQUEST_HEADERS) or "").split(",")
            headers = tuple(name.strip() for name in requested if _TOKEN.fullmatch(name.strip()))
        response = request.response
        response.status = 204
        response.headers.set("Access-Control-Allow-Methods", ", ".join(methods))
        if headers:
            response.headers.set("Access-Control-Allow-Headers", ", ".join(headers))
        response.headers.set("Access-Control-Max-Age", str(self._max_age_s))
        response.headers.set("Vary", "Access-Control-Request-Method, Access-Control-Request-Headers")
        response.end()


class CorsFinisher:
    """Adds CORS fields to the head of a response, unless the application has set them itself.

    Args:
        fields: the fields.
        varies: whether the response depends on the Origin field, for Vary.
    """

    def __init__(self, fields: dict[str, str], varies: bool) -> None:
        self._fields, self._varies = fields, varies

    def __call__(self, lines: bytes) -> bytes:
        """Return header lines with the missing CORS fields added."""
        if _ALLOW_ORIGIN_LINE.search(lines):
            return lines
        if self._varies:  # Origin in the first Vary line (RFC 9110 §12.5.5)
            values = _VARY_LINE.findall(lines)
            names = {name.strip().lower() for value in values for name in value.split(b",")}
            if not values:
                lines += b"Vary: Origin\r\n"
            elif b"origin" not in names and b"*" not in names:
                lines = _VARY_LINE.sub(
                    lambda line: b"Vary: " + b", ".join(filter(None, (line[1].rstrip(), b"Origin"))), lines, count=1
                )
        return with_missing_fields(lines, self._fields)


def is_preflight(request: CorsRequest) -> bool:
    """Return whether a request is a CORS preflight."""
    return request.method == "OPTIONS" and None not in (request.get("origin"), request.get(_REQUEST_METHOD))


def _tokens(argument: str, names: str | Iterable[str]) -> tuple[str, ...]:
    parts = names.split(",") if isinstance(names, str) else list(names)
    for name in parts:
        if not isinstance(name, str) or (name.strip() and _TOKEN.fullmatch(name.strip()) is None):
            raise ArgumentError(f"{argument}: invalid name {name!r}; separate names with commas, as in X-Name, Accept")
    return tuple(name.strip() for name in parts if name.strip())


_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_PROXY_FIELDS = frozenset(("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"))
_MAX_ACCEPTED_HOSTS = 1024  # cached names
_MAX_LOGGED = 255  # characters; no host name is longer

ORIGINS = Limit("origins", "origins", "request from a page of another origin")
HOSTS = Limit("hosts", "hosts", "request for another host")


class CheckedRequest(CorsRequest, Protocol):
    """The attributes of a request that `Access` reads, see `smqrt.http.message.Request`."""

    cors: Cors | None
    path: str
    host: str
    secure: bool

    @property
    def local(self) -> tuple[str, int]:
        """Local address and port of the connection."""

    def has_any(self, names: frozenset[str]) -> bool:
        """Return whether a header field of these names is present."""


class Access:
    """Checks of every request: Host, Origin and CORS.

    Args:
        origins: allowed origins, besides the server's own.
        hosts: accepted Host names. Without any, every name is accepted, or only loopback names if `loopback`.
        loopback: whether the server listens on loopback only. A web page whose host name resolves to 127.0.0.1 (DNS
            rebinding) sends that name as Host.
        debug: whether clients see tracebacks. None for clients on this machine, if `loopback`.
    """

    def __init__(
        self,
        origins: Origins | None = None,
        hosts: Hosts | None = None,
        loopback: bool = False,
        debug: bool | None = False,
    ) -> None:
        self._origins = origins or Origins()
        self._has_origins = bool(self._origins)
        self._cors = Cors()
        self._hosts = hosts or Hosts()
        self._loopback = loopback
        self._debug = debug
        self._any_host = self._hosts.all or not (self._hosts or loopback)
        self._accepted_hosts: set[str] = set()  # Host fields that passed the check

    def check(self, request: CheckedRequest) -> bool:
        """Check the Host and the Origin of a request, add CORS fields and respond to preflights.

        Returns:
            whether the request was a preflight and has been answered.

        Raises:
            HttpError: 403, the host or the origin is not allowed.
        """
        is_allowed = False
        if self._has_origins or request.cors is not None:
            is_allowed = self._rules(request).add_fields(request, self._origins)
        if request.host not in self._accepted_hosts and not self._any_host:
            host = request.get("host")
            name = host_name(host or "")
            if host is None or is_loopback(name) or self._hosts.has(name):
                if host is not None and len(host) <= _MAX_LOGGED and len(self._accepted_hosts) < _MAX_ACCEPTED_HOSTS:
                    self._accepted_hosts.add(host)
            elif self._hosts or _is_local(request):
                subject = f"for the host {host[:_MAX_LOGGED]!r}"
                sentence = "The server does not accept this host name; the setting `hosts` lists the accepted names."
                self._reject(request, HOSTS, subject, f"hosts={name}", sentence)
        if request.method not in _SAFE_METHODS:
            self.check_origin(request)
        if request.method != "OPTIONS" or not is_preflight(request):
            return False
        if is_allowed:
            self._rules(request).answer_preflight(request)
        elif self._allowed_origins(request) or request.get(_REQUEST_METHOD) not in _SAFE_METHODS:
            self.check_origin(request)
        # Without allowed origins, the application may respond to preflights of GET, HEAD and OPTIONS itself.
        return is_allowed

    def accepts_everywhere(self, host: str) -> bool:
        """Whether a Host that has passed `check` is accepted at every local address."""
        return self._any_host or host in self._accepted_hosts

    def check_origin(self, request: CheckedRequest, more: Origins | None = None) -> None:
        """Reject a request from a page of an origin that is not allowed. Requests without Origin are not from a page.

        Args:
            request: the request.
            more: allowed origins, besides those of the server.

        Raises:
            HttpError: 403.
        """
        origin = request.get("origin")
        if origin is None or same_origin(origin, request.get("host") or "", request.secure):
            return
        is_listed = self._allowed_origins(request).has(origin)
        if is_listed and (request.method in _SAFE_METHODS or self._rules(request).allows_method(request.method)):
            return
        if more is not None and more.has(origin):
            self._cors.add_fields(request, more)
            return
        subject = f"from a page of {origin[:_MAX_LOGGED]!r} for {(request.get('host') or '')[:_MAX_LOGGED]!r}"
        setting, remedy = f"origins={origin}", "the setting `origins` allows origins"
        if is_listed:
            setting = f"methods={request.method}"
        if request.cors is not None:
            setting, remedy = f"{setting} in setcors of the application", "`setcors` of the application allows origins"
        self._reject(request, ORIGINS, subject, setting, f"Requests from pages of other origins are denied; {remedy}.")

    def shows_errors(self, request: CheckedRequest) -> bool:
        """Return whether the client may see details of errors inside the server."""
        if self._debug is not None:
            return self._debug
        is_local = self._loopback and _is_local(request) and is_loopback(host_name(request.get("host") or ""))
        return is_local and not request.has_any(_PROXY_FIELDS)

    def _rules(self, request: CheckedRequest) -> Cors:
        return self._cors if request.cors is None else request.cors

    def _allowed_origins(self, request: CheckedRequest) -> Origins:
        own = self._rules(request).origins
        return self._origins if own is None else own

    def _reject(self, request: CheckedRequest, limit: Limit, subject: str, setting: str, sentence: str) -> NoReturn:
        # ascii() and the slices, because text of the client goes to the log
        rejected = f"{request.method} {request.path[:_MAX_LOGGED]!r} {subject}"
        limit.refused(rejected, f"to allow it, set {ascii(setting[:_MAX_LOGGED])[1:-1]}")
        raise HttpError(403, sentence)


def _is_local(request: CheckedRequest) -> bool:
    """Return whether the local address of the connection is a loopback address."""
    return is_loopback(request.local[0].partition("%")[0])
