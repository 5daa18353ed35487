"""Virtual directory tree that dispatches requests by path (spec: bas-api §4, runtime §5)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from posixpath import normpath
from typing import TYPE_CHECKING
from weakref import ref

from smqrt.errors import ArgumentError, SmqrtError
from smqrt.http.access import MAX_AGE_S, Cors, hidden
from smqrt.http.headers import Headers, with_missing_fields
from smqrt.http.logins.authenticator import Authenticator, Authorizer, LoginGuard
from smqrt.http.message import Request
from smqrt.http.resources import Io, Stat
from smqrt.http.static_files import StaticFile, StaticFiles

if TYPE_CHECKING:
    Func = Callable[[Request, str], object]
    Pages = Callable[[Request, Stat, str, "ResourceReader"], None]

log = logging.getLogger("smqrt")

MAX_NESTING = 10  # nested forwards, and nested includes, of one request (spec: bas-api §2.2)
PUBLIC = "public/"
"""Folder of a resource reader that needs no login (spec: bas-api §5)."""
_SLASHES = re.compile("/{2,}")
_DOTS = frozenset((".", ".."))
_REDIRECTED = frozenset(("GET", "HEAD", "POST"))
"""Methods of browsers. Only these are redirected to the URL with a slash at its end."""
_ALLOW = "GET, HEAD, POST, OPTIONS"
DAV_FIELDS = {"DAV": "1,2", "MS-Author-Via": "DAV"}
"""Header fields that identify a WebDAV server (RFC 4918 §10.1)."""
_INDEX = ("index.html", "index.htm", "index.lsp")


# Directories with CORS rules; usually none, and then no path is searched. Asking a `WeakSet` for that is slower.
_with_cors: set[ref[Directory]] = set()


class DispatchError(SmqrtError):
    """A failed forward, include or redirect.

    Attributes:
        word: "pagenotfound", "iscommitted", "toomanyforwards" or "toomanyincludes" (spec: bas-api §15).
    """

    def __init__(self, word: str, path: str) -> None:
        super().__init__(f"{word}: {path}")
        self.word = word


@dataclass(slots=True)
class HiddenPathRoute:
    """The route of a hidden path to a directory with its own rules for hidden names.

    Attributes:
        directory: the directory.
        relpath: the path relative to it.
        guards: the guards on the route, the outermost first, each with the path relative to its directory.
    """

    directory: Directory
    relpath: str
    guards: list[tuple[LoginGuard, str]]

    def serve(self, request: Request) -> bool:
        """Serve the request from the directory unless a guard stops it; return whether it was answered."""
        is_stopped = any(guard.stops(request, relpath) for guard, relpath in self.guards)
        return is_stopped or self.directory.service(request, self.relpath)


class _Changes:
    """Number of changes of all directories in this process that responses depend on."""

    count = 0
    attributes = frozenset(("_cors", "func", "guard", "headers", "io", "pages", "parent", "prefix", "service"))
    """Assigning one of these is a change. Insertion and removal assign `parent`."""


class Branch:
    """A node with child directories.

    Children are tried in this order: by priority, named before unnamed, then in the order of insertion.
    """

    def __init__(self) -> None:
        self._children: list[Directory] = []

    @property
    def children(self) -> tuple[Directory, ...]:
        """The children in the order in which they are tried."""
        return tuple(self._children)

    def insert(self, child: Directory) -> None:
        """Add a child.

        Raises:
            ArgumentError: the child is in a tree already ("alreadyinserted").
        """
        child.link(self, self._children)

    def baseuri(self) -> str:
        """Return the absolute path, with "/" at its end."""
        return "/"

    @property
    def _searched(self) -> list[Directory]:
        """All directories that are tried for its paths."""
        return self._children

    def cors(self, relpath: str) -> Cors | None:
        """Return the CORS rules of the innermost directory of a path that has rules, or None."""
        children = [child for child in self._searched if f"{relpath}/".startswith(child.prefix)]
        named = [child for child in children if child.prefix]  # rules of the application at / do not apply to others
        rules = (child.cors(relpath[len(child.prefix) :]) for child in named or children)
        return next((one for one in rules if one is not None), None)

    def file_servers(self, folder: str) -> Iterator[str]:
        """Yield the path from `folder`, which ends with "/", to each file server at or below it."""
        for child in tuple(self._searched):
            yield from child.file_servers(folder)

    def _try_children(self, children: list[Directory], request: Request, relpath: str) -> bool:
        """Serve a request from the first child that responds; return whether one has."""
        for child in tuple(children):  # handlers may change the tree
            prefix = child.prefix
            if relpath.startswith(prefix):
                if child.service(request, relpath[len(prefix) :]):
                    if request.sent_file is not None and not child.is_plain:
                        request.sent_file = None
                    return True
                request.is_repeatable = False  # next time it may respond
        return False

    def _guards(self, children: list[Directory], relpath: str) -> Iterator[tuple[LoginGuard, str]]:
        """Yield the guards of a path, each with the path relative to its directory."""
        for child in tuple(children):
            if relpath.startswith(child.prefix):
                yield from child.guards(relpath[len(child.prefix) :])

    def _find_hidden_route(self, children: list[Directory], relpath: str) -> HiddenPathRoute | None:
        """Return the route to the first directory with its own rules for hidden names."""
        routes = (
            child.hidden_route(relpath[len(child.prefix) :]) for child in children if relpath.startswith(child.prefix)
        )
        return next(filter(None, routes), None)


class Directory(Branch):
    """A virtual directory. Subclasses override `_serve_own`, and call `super()._serve_own` first, for the guard.

    Args:
        name: path segment of the directory; None or "" for every path.
        priority: −127 to 127; higher ones are tried first.

    Attributes:
        func: called first, with the request and the relative path; returns `False` if it did not respond.
        guard: called next; protects everything that follows.
        prefix: beginning of the paths of this directory; empty for every path.
        is_file_server: whether it is a WebDAV server.
    """

    is_file_server = False

    _is_plain = True

    def __init__(self, name: str | None = None, priority: int = 0) -> None:
        super().__init__()
        if not -127 <= priority <= 127:
            raise ArgumentError(f"priority: {priority} is out of range; use -127 to 127")
        if name and "/" in name.strip("/"):
            raise ArgumentError(
                f"name: {name!r} has a slash; use one path segment and insert directories into each other"
            )
        self.name = (name or "").strip("/")
        self.priority = priority
        self.func: Func | None = None
        self.guard: LoginGuard | None = None
        self.parent: Branch | None = None
        self.prefix = self.name + "/" if self.name else ""
        self._siblings: list[Directory] = []
        self._cors: Cors | None = None

    @property
    def is_plain(self) -> bool:
        """Whether its class says that a file of it may be sent again for an equal request; not inherited."""
        return "_is_plain" in type(self).__dict__ and "service" not in self.__dict__

    def __setattr__(self, name: str, value: object) -> None:
        """Count changes that responses depend on."""
        if name in _Changes.attributes:
            _Changes.count += 1
        super().__setattr__(name, value)

    def setfunc(self, func: Func | None) -> None:
        """Set `func`; None removes it (spec: bas-api §4).

        Raises:
            ArgumentError: it is not callable.
        """
        if func is not None and not callable(func):
            raise ArgumentError(f"func: a function is needed, not {type(func).__name__}")
        self.func = func

    def setauth(self, authenticator: Authenticator | None = None, authorizer: Authorizer | None = None) -> None:
        """Require a login for the files and directories in it, but not for `func` (spec: bas-api §4, runtime §5).

        This takes effect for new requests.

        Args:
            authenticator: authenticates clients; None removes the requirement.
            authorizer: authorizes their requests; None permits all.
        """
        self.guard = None if authenticator is None else LoginGuard(authenticator, authorizer, self)

    def setcors(
        self,
        origins: str | Iterable[str] | None = None,
        *,
        methods: str | Iterable[str] | None = None,
        headers: str | Iterable[str] | None = None,
        expose: str | Iterable[str] = (),
        credentials: bool | None = None,
        max_age_s: int = MAX_AGE_S,
    ) -> None:
        """Set the CORS rules of the paths in it. They take effect at once; without arguments they are removed.

        Args and raises: see `Cors`. An empty `origins` denies all other origins.
        """
        rules = Cors(
            origins, methods=methods, headers=headers, expose=expose, credentials=credentials, max_age_s=max_age_s
        )
        has_any = bool(expose) or max_age_s != MAX_AGE_S or (origins, methods, headers, credentials) != (None,) * 4
        self._cors = rules if has_any else None
        _with_cors.add(ref(self, _with_cors.discard))

    def cors(self, relpath: str) -> Cors | None:
        """See `Branch.cors`."""
        return super().cors(relpath) or self._cors

    def file_servers(self, folder: str) -> Iterator[str]:
        """See `Branch.file_servers`."""
        is_inside = folder.startswith(self.prefix)
        if not is_inside and not self.prefix.startswith(folder):
            return
        rest, path_left = (folder[len(self.prefix) :], "") if is_inside else ("", self.prefix[len(folder) :])
        if self.is_file_server and not rest:
            yield path_left
        for below in super().file_servers(rest):
            yield path_left + below

    def deny(self, request: Request) -> None:
        """Respond to a request that the authorizer has denied."""
        request.response.error(403)

    def guards(self, relpath: str) -> Iterator[tuple[LoginGuard, str]]:
        """Yield the guards of the hidden path `relpath`, each with the path relative to its directory."""
        if self.guard is not None:
            yield self.guard, relpath
        yield from self._guards(self._children, relpath)

    def hidden_route(self, relpath: str) -> HiddenPathRoute | None:
        """Return the route of the hidden path `relpath` to a directory with its own rules for hidden names."""
        route = self._find_hidden_route(self._children, relpath)
        if route is not None and self.guard is not None:
            route.guards.insert(0, (self.guard, relpath))
        return route

    def link(self, parent: Branch, siblings: list[Directory]) -> None:
        """Add the directory to `siblings`; called by `insert`."""
        if self.parent is not None:
            raise ArgumentError(f"directory {self.name!r}: alreadyinserted; unlink it first")
        self.parent, self._siblings = parent, siblings
        siblings.append(self)
        siblings.sort(key=lambda child: (-child.priority, not child.name))  # stable: equal ones keep their order

    def unlink(self) -> bool:
        """Remove the directory from its tree; return whether it was in one."""
        if self.parent is None:
            return False
        self._siblings.remove(self)
        self.parent = None
        return True

    def baseuri(self) -> str:
        """See `Branch.baseuri`."""
        above = self.parent.baseuri() if self.parent is not None else "/"
        return above + self.prefix

    def service(self, request: Request, relpath: str) -> bool:
        """Serve a request with `func`, own files or children; return whether it was answered."""
        if self.func is not None and self._call(request, relpath):
            return True
        return self._serve_own(request, relpath) or self._try_children(self._children, request, relpath)

    def resources(self, request: Request, relpath: str) -> bool:
        """Serve a request like `service`, but without `func`."""
        return self._serve_own(request, relpath) or self._try_children(self._children, request, relpath)

    def _call(self, request: Request, relpath: str) -> bool:
        """Call `func`, unless it is already running for this request: it does not receive its own forwards."""
        if self.func is None or self in request.running:
            return False
        request.is_repeatable = False
        outer = request.running
        request.running = (*outer, self)
        try:
            return self.func(request, relpath) is not False
        finally:
            request.running = outer

    def _serve_own(self, request: Request, relpath: str) -> bool:
        if self.guard is None or not request.needs_checks:
            return False
        request.is_repeatable = False
        return self.guard.stops(request, relpath)


class ResourceReader(Directory):
    """A directory that serves the files of an io.

    Args:
        name, priority: see `Directory`.
        io: the files.

    Attributes:
        headers: fields added to every response, except in includes.
        pages: runs a Lua Server Page, called with request, stat, name in the io and this directory. None hides pages.
    """

    _is_plain = True

    def __init__(self, name: str | None = None, priority: int = 0, *, io: Io) -> None:
        super().__init__(name, priority)
        self.io = io
        self.headers: dict[str, str] = {}
        self.pages: Pages | None = None
        self._checked: tuple[dict[str, str], Headers] = {}, Headers()
        self._prologues: list[Directory] = []
        self._files = StaticFiles(io)

    @property
    def _searched(self) -> list[Directory]:
        return self._prologues + self._children

    def insertprolog(self, child: Directory) -> None:
        """Add a child that is tried before the files, for initial requests only. Raises as `insert`."""
        child.link(self, self._prologues)

    def guards(self, relpath: str) -> Iterator[tuple[LoginGuard, str]]:
        """See `Directory.guards`."""
        yield from self._guards(self._prologues, relpath)
        if not relpath.startswith(PUBLIC):
            yield from super().guards(relpath)

    def hidden_route(self, relpath: str) -> HiddenPathRoute | None:
        """See `Directory.hidden_route`."""
        route = self._find_hidden_route(self._prologues, relpath)  # prologues come before the guard
        if route is not None:
            return route
        if relpath.startswith(PUBLIC):
            return self._find_hidden_route(self._children, relpath)
        return super().hidden_route(relpath)

    def _serve_own(self, request: Request, relpath: str) -> bool:
        if self._prologues and request.needs_checks and self._try_children(self._prologues, request, relpath):
            return True
        if self.guard is not None and not relpath.startswith(PUBLIC) and super()._serve_own(request, relpath):
            return True
        if relpath and not relpath.endswith("/"):
            entry = self._files.find(relpath)
        else:
            found = (self._files.find(relpath + index) for index in _INDEX)
            entry = next((one for one in found if one is not None), None)
            request.is_repeatable = False  # a file with another of these names may have precedence next time
        if entry is None:
            request.is_repeatable = False  # it may have such a file next time, before its children
            return False
        if entry.is_page:
            return self._run(request, entry)
        self._files.serve(request, entry, self.headers)
        return True

    def _run(self, request: Request, entry: StaticFile) -> bool:
        if self.pages is None:
            return False
        if self.headers and not request.includes:
            if self._checked[0] != self.headers:  # check them after a change, not for each page
                self._checked = dict(self.headers), Headers(self.headers)
            request.response.headers.merge(self._checked[1])
        self.pages(request, entry.stat, entry.name, self)
        return True


class Root(Branch):
    """The top of the tree, which receives every request."""

    @property
    def version(self) -> int:
        """Number that grows with each change of a tree, a function, a login or CORS rules."""
        return _Changes.count

    def cors(self, path: str) -> Cors | None:
        """See `Branch.cors`. Here `path` is the path of a request."""
        return super().cors(_relative(path)) if _with_cors else None

    def dispatch(self, request: Request) -> None:
        """Respond with the first directory that serves the path.

        Without any, respond with 302 to the path with a slash, or with 404 if the path looks like a file.
        """
        path = _relative(request.path)
        if request.method not in _REDIRECTED:
            folder = path if path.endswith("/") or not path else f"{path}/"
            servers = set(self.file_servers(folder))
            if request.method == "OPTIONS" and servers:  # also above file servers: Windows sends OPTIONS there first
                request.response.finishers += (_add_dav_fields,)
            if "" in servers:
                path = folder  # WebDAV clients do not follow redirects
        if request.path == "*":
            request.response.status = 204
            request.response.headers.set("Allow", _ALLOW)
        elif hidden(path):  # 404, or a login is required as for other names (spec: bas-api §17 A4)
            request.is_repeatable = False
            is_plain = not _DOTS.intersection(path.split("/"))  # an authorizer would not recognize "./a" as "a"
            route = self._find_hidden_route(self._children, path) if is_plain else None
            if route is not None:  # to a file server, which has its own rules for hidden names
                is_answered = route.serve(request)
            else:
                guards = self._guards(self._children, path)
                is_answered = any(guard.stops(request, relpath) for guard, relpath in guards)
            if not is_answered:
                request.response.error(404)
        elif not self._try_children(self._children, request, path):
            self._not_found(request)

    def internal(self, request: Request, path: str, base: Directory, mode: str) -> None:
        """Respond with another resource, for `response:forward`, `include` and `redirect` (spec: bas-api §2.2).

        Hidden names are allowed, except for "redirect". A directory function does not receive its own forwards.

        Args:
            request: the request.
            path: from the root of the server with a leading "/", else relative to `base`.
            base: the directory that serves the caller.
            mode: "forward" discards the body and keeps the header fields. "include" appends to the body. "redirect"
                searches as for a new request and also discards the header fields. Status and cookies are always kept.

        Raises:
            DispatchError: no resource has the path, the nesting is too deep, or the response was committed before a
                forward. The response is then unchanged.
        """
        response = request.response
        outer, draft = (request.includes, request.forwards, request.needs_checks), None
        request.needs_checks = mode == "redirect"
        if mode == "include":
            request.includes += 1
        else:
            if response.committed:
                raise DispatchError("iscommitted", path)
            request.forwards += 1
        try:
            if max(request.includes, request.forwards) > MAX_NESTING:
                raise DispatchError("toomanyincludes" if mode == "include" else "toomanyforwards", path)
            if mode != "include":
                draft = response.draft()
                response.reset("buffer" if mode == "forward" else "all")
            if not self._search(request, path, base, mode):
                if draft is not None:
                    response.restore(draft)
                raise DispatchError("pagenotfound", path)
        finally:
            request.includes, request.forwards, request.needs_checks = outer

    def _search(self, request: Request, path: str, base: Directory, mode: str) -> bool:
        normal = normalize(path)
        if normal is not None and not path.startswith("/"):
            return not (mode == "redirect" and hidden(normal)) and base.resources(request, normal)
        normal = normalize(path if path.startswith("/") else base.baseuri() + path)
        if normal is None or (mode == "redirect" and hidden(normal)):
            return False
        return self._try_children(self._children, request, normal)

    def _not_found(self, request: Request) -> None:
        last = request.path.rpartition("/")[2]
        if _add_dav_fields in request.response.finishers:
            request.response.headers.set("Allow", _ALLOW)
            request.response.end()
            return
        if not last or ("." in last and "" not in self.file_servers(f"{_relative(request.path)}/")):
            request.response.error(404)
            return
        path, mark, query = request.target.partition("?")
        scheme = "https" if request.secure else "http"
        request.response.redirect(f"{scheme}://{request.authority}{request.prefix}{path}/{mark}{query}")


def _add_dav_fields(fields: bytes) -> bytes:
    """Return header lines with the missing WebDAV fields added."""
    return with_missing_fields(fields, DAV_FIELDS)


def _relative(path: str) -> str:
    """Return a path without its first slash and without empty parts, so that the guard of "a/" also protects "//a/"."""
    return _SLASHES.sub("/", path)[1:] if "//" in path else path[1:]


def normalize(path: str) -> str | None:
    """Return a path without leading slash, "." and ".."; None if it leads above the root."""
    clean = normpath(path.lstrip("/"))
    if clean == ".." or clean.startswith("../"):
        return None
    clean = "" if clean == "." else clean
    return clean + "/" if path.endswith("/") and clean else clean
