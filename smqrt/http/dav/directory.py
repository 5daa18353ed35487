"""File server directories: WebDAV and the web file manager (spec: bas-api §4)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from gevent.lock import BoundedSemaphore

from smqrt.errors import ArgumentError
from smqrt.http.access import hidden
from smqrt.http.dav.share import DavShare, canonical, href
from smqrt.http.forms import parse_parameters
from smqrt.http.headers import HttpError, http_date, reason
from smqrt.http.logins.authenticator import GuardedDirectory, passed
from smqrt.http.message import Request
from smqrt.http.resources import Io, IoError, Stat
from smqrt.http.sessions import HttpSession
from smqrt.http.static_files import StaticFiles, content_type
from smqrt.http.tree import DAV_FIELDS, Branch, Directory, HiddenPathRoute
from smqrt.http.wsgi import answer
from smqrt.loop.scheduling import Turn

if TYPE_CHECKING:
    from wsgidav.lock_man.lock_manager import LockManager

    from smqrt.http.dav.properties import Locks


log = logging.getLogger("smqrt")

MAX_UPLOADS, MAX_LOCKS = 5, 20  # spec: bas-api §4
SESSION_ID = 24
"""Characters of a session's id, which is the first segment of a session URL."""
_READING = frozenset(("GET", "HEAD"))
_METHODS = "OPTIONS, GET, HEAD, PUT, DELETE, PROPFIND, PROPPATCH, MKCOL, COPY, MOVE, LOCK, UNLOCK"
_ENGINE_METHODS = frozenset(_METHODS.split(", ")) - _READING - {"OPTIONS"}
_FILE_FIELDS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "private, no-cache"}
_SANDBOX = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_ACTIVE_FIELDS = _FILE_FIELDS | {"Content-Security-Policy": _SANDBOX}
_ACTIVE = ("text/html", "image/svg+xml", "application/xhtml+xml", "text/xml", "application/xml")


class DavDirectory(Directory):
    """A directory that serves an io over WebDAV.

    Args:
        name, priority: see `Directory`.
        io: the files.
        lockdir: folder in `io` for the locks, which is created and hidden from clients. Without it LOCK is rejected,
            and clients that lock before they write can only read.
        max_uploads: limit of concurrent PUT requests; further ones get a 503 response.
        max_locks: limit of locks; beyond it, LOCK gets a 503 response.
    """

    is_file_server = True

    def __init__(
        self,
        name: str | None = None,
        priority: int = 0,
        *,
        io: Io,
        lockdir: str | None = None,
        max_uploads: int = MAX_UPLOADS,
        max_locks: int = MAX_LOCKS,
    ) -> None:
        super().__init__(name, priority)
        if max_uploads < 1 or max_locks < 1:
            raise ArgumentError("maxuploads and maxlocks must be at least 1")
        self.io = io
        self._max_uploads, self._uploads = max_uploads, 0
        self._locking = _Locking(io, lockdir, max_locks) if lockdir else None
        self._views: dict[bool, _View] = {}  # by whether the client has logged in here, see `_view`
        import smqrt.http.dav.engine  # noqa: F401 -- needs 10 MB, so it is imported only for file servers

    @property
    def locks(self) -> Locks | None:
        """The locks; None without a folder for them."""
        return self._locking.locks if self._locking else None

    def deny(self, request: Request) -> None:
        """See `Directory.deny`. Sends a page to browsers and plain text to programs (spec: bas-api §17)."""
        _error(request, 403)

    def hidden_route(self, relpath: str) -> HiddenPathRoute | None:
        """See `Directory.hidden_route`. `DavShare.shows` decides which names clients see."""
        return HiddenPathRoute(self, relpath, [])

    def _serve_own(self, request: Request, relpath: str) -> bool:
        base, rest = self.baseuri(), relpath
        first, slash, below = relpath.partition("/")
        is_folder = slash or request.method not in _READING  # GET and HEAD are redirected to the URL with a slash
        sessions = request.logins.sessions
        session = sessions.find(first) if len(first) == SESSION_ID and is_folder else None
        if session is not None:  # a session URL
            sessions.adopt(request, session)
            self._on_session_url(session)
            base, rest = f"{base}{first}/", below
            if not self._allows_also(request, request.method, rest):
                raise HttpError(403)  # outer guards have checked the path with the session id, not this one
        if super()._serve_own(request, rest):
            return True
        return self._serve(DavRequest(request, base, canonical(rest), rest.endswith("/") or not rest))

    def _serve(self, target: DavRequest) -> bool:
        request = target.request
        if request.method in _READING or not request.initial:
            if self._read(target):
                return True
            if request.initial and hidden(target.name):
                raise HttpError(404)  # the search must not continue with directories that serve hidden names
            return False
        if request.method == "OPTIONS":
            for field, value in (*DAV_FIELDS.items(), ("Allow", _METHODS), ("Accept-Ranges", "bytes")):
                request.response.headers.set(field, value)
            request.response.headers.set("Content-Length", "0")
            request.response.end()
        elif request.method not in _ENGINE_METHODS:
            request.response.error(405, headers={"Allow": _METHODS})
        elif request.method == "LOCK" and self._locking is None:
            raise HttpError(403, "this file server has no folder for locks; add one with the argument `lockdir`")
        elif request.method != "PUT":
            self._run(target)
        elif self._uploads >= self._max_uploads:
            detail = f"limit reached: maxuploads ({self._max_uploads}); try again later"
            raise HttpError(503, detail, headers={"Retry-After": "2"}, close=True)
        else:
            self._uploads += 1
            try:
                self._run(target)
            finally:
                self._uploads -= 1
        return True

    def _on_session_url(self, session: HttpSession) -> None:
        """Hook for a request with the URL of a session."""

    def _view(self, request: Request) -> _View:
        enclosing: list[GuardedDirectory] = []
        directory: Branch | None = self
        while isinstance(directory, Directory):
            enclosing.append(directory)
            directory = directory.parent
        # Clients that have logged in at this directory or at an outer one see hidden files too.
        is_owner = any(guard.directory in enclosing for guard in passed(request))
        if is_owner not in self._views:
            share = DavShare(self.io, self._locking.folder if self._locking else None, is_owner)
            self._views[is_owner] = _View(share, StaticFiles(share.io))
        return self._views[is_owner]

    def _allows_also(self, request: Request, method: str, name: str) -> bool:
        """Return whether the guards that have permitted a request also permit a method for another file."""
        return all(guard.allows_also(request, method, self.baseuri() + name) for guard in passed(request))

    # Reading

    def _read(self, target: DavRequest) -> bool:
        view = self._view(target.request)
        if not view.share.shows(target.name):
            return False
        if not target.is_folder:
            entry = view.files.find(target.name)
            if entry is not None:
                kind = content_type(target.name).partition(";")[0]
                view.files.serve(target.request, entry, _ACTIVE_FIELDS if kind in _ACTIVE else _FILE_FIELDS)
                return True
        try:
            stat = view.share.stat(target.name)
        except IoError as error:
            raise HttpError(500, error.word) from None
        return stat is not None and stat.isdir and self._read_folder(target, view.share, stat)

    def _read_folder(self, target: DavRequest, share: DavShare, stat: Stat) -> bool:
        """Respond to a GET of a folder and return True; return False without the web file manager."""
        return False

    # All other methods

    def _run(self, target: DavRequest) -> None:
        from wsgidav.dav_error import DAVError

        from smqrt.http.dav.engine import Engine

        request, share = target.request, self._view(target.request).share
        locking, login = self._locking, request.user()
        engine = Engine(*((locking.manager(), locking.properties) if locking else (None, None)))
        user = login.name if login is not None else ""
        # A Destination may name the session URL of the request, or the URL without a session.
        bases = (target.base,) if target.base == self.baseuri() else (target.base, self.baseuri())

        def application(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
            environ["smqrt.path"] = "/" + target.name + ("/" if target.is_folder and target.name else "")
            environ["smqrt.allows"] = lambda method, name: self._allows_also(request, method, name)
            return engine(share, bases, user, environ, start)

        try:
            answer(application, request, target.base, target.name, None)
        except DAVError as error:
            _respond_error(request, error)
        except IoError as error:
            raise HttpError(500, error.word) from None
        finally:
            if locking:
                locking.save()


class DavRequest:
    """A request with the path of the share and the name in it."""

    __slots__ = ("base", "is_folder", "name", "request")

    def __init__(self, request: Request, base: str, name: str, is_folder: bool) -> None:
        self.request, self.base, self.name, self.is_folder = request, base, name, is_folder

    @property
    def url(self) -> str:
        """The URL path; that of a folder ends with a slash."""
        return href(f"{self.base}{self.name}/" if self.name else self.base)


class _View:
    """The files that one kind of client sees: clients that have logged in here, or all others."""

    def __init__(self, share: DavShare, files: StaticFiles) -> None:
        self.share, self.files = share, files


class _Locking:
    """The locks, and the properties that clients set, with the folder that stores them.

    The first use reads the folder, which may block. If the folder cannot be created, the state is in memory only.
    """

    def __init__(self, io: Io, folder: str, max_locks: int) -> None:
        from wsgidav.lock_man.lock_manager import LockManager

        from smqrt.http.dav.properties import DeadProperties, Locks

        self.folder = canonical(folder)
        self.locks, self.properties = Locks(max_locks), DeadProperties()
        self._io, self._loaded, self._is_persistent, self._loading = io, False, True, BoundedSemaphore()
        self._manager = LockManager(self.locks)

    def manager(self) -> LockManager:
        """Return WsgiDAV's lock manager, after loading the state."""
        with self._loading:
            if not self._loaded:
                try:
                    self.locks.load(self._io, self.folder)
                    self.properties.load(self._io, self.folder)
                except IoError as error:
                    self._is_persistent = False
                    log.warning("locks of a file server are in memory only: %s: %s", self.folder, error)
                self._loaded = True
        return self._manager

    def save(self) -> None:
        """Store the changes."""
        if not self._is_persistent:
            return
        with self._loading:
            try:
                self.locks.save(self._io, self.folder)
                self.properties.save(self._io, self.folder)
            except IoError as error:
                log.warning("locks of a file server cannot be stored in %s: %s", self.folder, error)


def _error(request: Request, status: int, detail: str = "", headers: dict[str, str] | None = None) -> None:
    """Respond with an error: a page for browsers, plain text for programs."""
    if "text/html" in (request.get("accept") or ""):
        request.response.error(status, detail, headers)
        return
    response = request.response
    response.reset()
    response.status = status
    for name, value in (headers or {}).items():
        response.headers.set(name, value)
    response.headers.set("Content-Type", "text/plain; charset=utf-8")
    response.end(f"{status} {reason(status)}{': ' if detail else ''}{detail}\n".encode("utf-8", "replace"))


def _respond_error(request: Request, error: Any) -> None:
    """Respond with an error of the engine. Raises ConnectionError if the client has disconnected."""
    if isinstance(error.src_exception, ConnectionError):
        raise error.src_exception
    if error.value == 500:
        log.error("WebDAV %s %s failed", request.method, request.path, exc_info=error.src_exception)
    response = request.response
    if response.committed:  # only closing the connection shows the failure to the client
        response.close = response.ended = True
        return
    headers = dict(error.add_headers or ())
    if error.value == 405:
        headers["Allow"] = _METHODS
    if error.err_condition is None:
        _error(request, error.value, error.context_info or "", headers)
        return
    response.reset()
    response.status = error.value
    response.headers.set("Content-Type", "application/xml; charset=utf-8")
    response.end(error.err_condition.as_string().encode())


# ---- The web file manager: WebDAV with a page for browsers (spec: bas-api §4, §16). Its script is /rtl/wfm/wfm.js.

Hook = Callable[[Request, str], object]

_BATCH = 64  # rows that are sent together
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FIELDS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "private, no-store",
    "Referrer-Policy": "same-origin",  # a session URL is a secret
}
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/rtl/page.css">
<link rel="stylesheet" href="/rtl/wfm/wfm.css">
<script type="module" src="/rtl/wfm/wfm.js"></script>
</head>
<body>
<header>
<nav aria-label="Folders"><ol>{crumbs}</ol></nav>
<p class="links">{links}</p>
</header>
<main>
<div class="tools">
<button type="button" id="upload">Upload</button>
<button type="button" id="newfolder" class="second">New folder</button>
<input type="file" id="files" multiple hidden>
<p id="count" class="soft"></p>
</div>
<ul id="uploads" aria-live="polite"></ul>
<p id="message" role="alert" hidden></p>
<table>
<thead><tr><th scope="col">Name</th><th scope="col" class="size">Size</th><th scope="col" class="time">Changed</th><th scope="col"><span class="unseen">Actions</span></th></tr></thead>
<tbody id="entries">
"""  # noqa: E501
_UNITS = ("kB", "MB", "GB", "TB")
_UP = '<tr class="up"><td colspan="4"><a href="../">‹ Up</a></td></tr>\n'
_ROW = (
    '<tr data-name="{name}" data-kind="{kind}"><td><a href="{url}">{shown}</a></td>'
    '<td class="size">{size}</td><td class="time"><time datetime="{iso}" title="{date}">{day}</time></td>'
    '<td class="actions">{actions}</td></tr>\n'
)
_ACTIONS = (
    '<button type="button" class="plain" data-do="rename">Rename</button>'
    '<button type="button" class="plain" data-do="delete">Delete</button>'
)
_DOWNLOAD = '<a class="plain" href="{url}" download>Download</a>'
_TAIL = """</tbody>
</table>
<p id="nothing" class="soft"{hidden}>Nothing here yet. Drop files on this page, or choose Upload.</p>
<p class="soft keys">Keys: ↑ ↓ choose, Enter opens, F2 renames, Del deletes, Backspace goes up, U uploads, N creates a folder.</p>
</main>
<div id="drop" hidden><p>Drop the files to upload them here</p></div>
<dialog id="ask" aria-labelledby="question"><form method="dialog"><h2 id="question"></h2><label><span class="unseen">Name</span><input id="answer" autocomplete="off" maxlength="255"></label><p class="buttons"><button type="button" value="" class="second" id="cancel">Cancel</button><button value="yes" id="yes">OK</button></p></form></dialog>
</body>
</html>
"""  # noqa: E501


class WfsDirectory(DavDirectory):
    """A directory that serves an io over WebDAV and with the web file manager. Args: see `DavDirectory`.

    Attributes:
        session_s: for sessions with a session URL, the time without a request after which they expire; None keeps the
            time of each session.
        helpuri, logouturi: URLs of the links "Help" and "Log out"; empty for no link.
        filterservice: called before each request with the request and the path; returns True if it has responded.
        dircmd: the same, for requests with a parameter `cmd`.
    """

    session_s: int | None = None
    helpuri = ""
    logouturi = ""
    filterservice: Hook | None = None
    dircmd: Hook | None = None

    def _serve(self, target: DavRequest) -> bool:
        request = target.request
        path = target.name + ("/" if target.is_folder and target.name else "")
        if self.filterservice is not None and self.filterservice(request, path):
            return True
        if self.dircmd is not None:
            has_command = any(name == b"cmd" for name, _ in parse_parameters(request.query.encode("ascii")))
            if has_command and self.dircmd(request, path):
                return True
        return super()._serve(target)

    def _on_session_url(self, session: HttpSession) -> None:
        if self.session_s is not None:
            session.max_inactive_s = self.session_s

    def _read_folder(self, target: DavRequest, share: DavShare, stat: Stat) -> bool:
        response = target.request.response
        if not target.is_folder:
            response.redirect(target.url)
            return True
        for field, value in _FIELDS.items():
            response.headers.set(field, value)
        if target.request.method == "HEAD":
            response.end()
            return True
        try:
            found = share.list(target.name)
        except IoError as error:
            raise HttpError(403 if error.word == "toomuchdata" else 500, error.word) from None
        turn = Turn()
        for piece in self._page(target, found):
            response.write(piece.encode("utf-8", "replace"))
            turn.yield_if_due()
        return True

    def _page(self, target: DavRequest, found: list[tuple[str, Stat]]) -> Iterator[str]:
        parts = target.name.split("/") if target.name else []
        title = escape(parts[-1] if parts else self.name or "Files")
        uris = (("Help", self.helpuri), ("Log out", self.logouturi))
        links = " ".join(f'<a href="{escape(uri)}">{text}</a>' for text, uri in uris if uri)
        names = [self.name or "Files", *parts]
        urls = [href(target.base + "".join(f"{part}/" for part in parts[:count])) for count in range(len(names))]
        crumbs = [f'<li><a href="{escape(url)}">{_shown(name)}</a></li>' for url, name in zip(urls, names, strict=True)]
        crumbs[-1] = f'<li aria-current="page"><h1>{_shown(names[-1])}</h1></li>'
        yield _HEAD.format(title=title, crumbs="".join(crumbs), links=links)
        if parts:
            yield _UP
        for start in range(0, len(found), _BATCH):
            yield "".join([_row(stat) for _, stat in found[start : start + _BATCH]])
        yield _TAIL.format(hidden=" hidden" if found else "")


def _row(stat: Stat) -> str:
    url = escape("./" + href(stat.name) + ("/" if stat.isdir else ""))
    when = datetime.fromtimestamp(stat.mtime, UTC)
    return _ROW.format(
        name=_shown(stat.name),
        shown=_shown(stat.name).replace("_", "_<wbr>"),  # long names break there
        kind="folder" if stat.isdir else "file",
        url=url,
        size="" if stat.isdir else _size(stat.size),
        iso=f"{when:%Y-%m-%dT%H:%M:%SZ}",
        date=http_date(stat.mtime),
        day=f"{when:%Y-%m-%d %H:%M}",
        actions=_ACTIONS if stat.isdir else _DOWNLOAD.format(url=url) + _ACTIONS,
    )


def _shown(name: str) -> str:
    return escape(name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def _size(size_bytes: int) -> str:
    """Return a size with a unit, such as "1.5 MB"."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    size, unit = size_bytes / 1000, 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if size >= 10 else f"{size:.1f} {_UNITS[unit]}"
