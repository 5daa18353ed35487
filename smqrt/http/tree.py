"""The virtual directory tree: who answers which path (spec: bas-api §4, runtime §5)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from posixpath import normpath
from typing import TYPE_CHECKING
from weakref import WeakSet

from smqrt.errors import ArgumentError, SmqrtError
from smqrt.http.access import MAX_AGE_S, Cors, hidden
from smqrt.http.headers import Headers, with_missing_fields
from smqrt.http.logins.authenticator import Authenticator
from smqrt.http.logins.authorizer import Authorizer, LoginGuard
from smqrt.http.message import Request
from smqrt.http.resources import Io, Stat
from smqrt.http.static_files import StaticFile, StaticFiles

if TYPE_CHECKING:
    Func = Callable[[Request, str], object]
    Pages = Callable[[Request, Stat, str, "ResourceReader"], None]

log = logging.getLogger("smqrt")

MAX_NESTING = 10  # forwards and includes of one request, each (spec: bas-api §2.2)
PUBLIC = "public/"
"""What needs no login in a directory that reads files (spec: bas-api §5)."""
_SLASHES = re.compile("/{2,}")
_DOTS = frozenset((".", ".."))
_REDIRECTED = frozenset(("GET", "HEAD", "POST"))
"""What browsers send: at an address without its last slash they are led to the one with it."""
_ALLOW = "GET, HEAD, POST, OPTIONS"
DAV_FIELDS = {"DAV": "1,2", "MS-Author-Via": "DAV"}
"""How a file server is known (RFC 4918 §10.1)."""
_INDEX = ("index.html", "index.htm", "index.lsp")


_with_cors: WeakSet[Directory] = WeakSet()  # those with rules of their own; mostly there is none


class DispatchError(SmqrtError):
    """A forward or include can't be done.

    Attributes:
        word: "pagenotfound", "iscommitted", "toomanyforwards" or "toomanyincludes" (spec: bas-api §15).
    """

    def __init__(self, word: str, path: str) -> None:
        super().__init__(f"{word}: {path}")
        self.word = word


@dataclass(slots=True)
class HiddenPathRoute:
    """The way for a hidden name to a directory that has rules of its own for such names.

    Attributes:
        directory: that directory.
        relpath: the rest of the path behind it.
        guards: those before it, from the outside, with what they are told of the path.
    """

    directory: Directory
    relpath: str
    guards: list[tuple[LoginGuard, str]]

    def lets_in(self, request: Request) -> bool:
        """Have the directory answer, if all guards agree; return whether anybody answered."""
        stopped = any(guard.stops(request, relpath) for guard, relpath in self.guards)
        return stopped or self.directory.service(request, self.relpath)


class Branch:
    """What has child directories, kept in the order in which they are asked: by priority, named before unnamed, first
    inserted first."""

    def __init__(self) -> None:
        self._children: list[Directory] = []

    @property
    def children(self) -> tuple[Directory, ...]:
        """The children in the order they are asked."""
        return tuple(self._children)

    def insert(self, child: Directory) -> None:
        """Add a child.

        Raises:
            ArgumentError: it is in a tree already ("alreadyinserted").
        """
        child.link(self, self._children)

    def baseuri(self) -> str:
        """Return the absolute path, with "/" at its end."""
        return "/"

    @property
    def _below(self) -> list[Directory]:
        """All that is asked for paths in it."""
        return self._children

    def cors(self, relpath: str) -> Cors | None:
        """Return the rules of the innermost directory on the way of a path that has some; None without."""
        ways = [child for child in self._below if f"{relpath}/".startswith(child.prefix)]
        named = [child for child in ways if child.prefix]  # what is open at / opens no other application
        rules = (child.cors(relpath[len(child.prefix) :]) for child in named or ways)
        return next((one for one in rules if one is not None), None)

    def file_servers(self, folder: str) -> Iterator[str]:
        """Yield the rest of the way from `folder`, a path with "/" at its end, to each file server at or below it."""
        for child in tuple(self._below):
            yield from child.file_servers(folder)

    def _ask(self, children: list[Directory], request: Request, relpath: str) -> bool:
        for child in tuple(children):  # handlers may change the tree
            prefix = child.prefix
            if relpath.startswith(prefix) and child.service(request, relpath[len(prefix) :]):
                return True
        return False

    def _guards(self, children: list[Directory], relpath: str) -> Iterator[tuple[LoginGuard, str]]:
        """Yield the guards that a request for `relpath` meets, and what they are told of the path."""
        for child in tuple(children):
            if relpath.startswith(child.prefix):
                yield from child.guards(relpath[len(child.prefix) :])

    def _open_door(self, children: list[Directory], relpath: str) -> HiddenPathRoute | None:
        """Return the way to the first directory that has rules of its own for hidden names."""
        ways = (child.door(relpath[len(child.prefix) :]) for child in children if relpath.startswith(child.prefix))
        return next(filter(None, ways), None)


class Directory(Branch):
    """A virtual directory. A class below that answers in `_own` asks `super()._own` first: the guard.

    Args:
        name: the path segment it answers; None or "" answers every path.
        priority: −127…127, higher is asked first.

    Attributes:
        func: asked first with the request and the rest of the path; `False` means not handled.
        guard: asked then: who is let in to all that follows.
        prefix: how the paths begin that lead here; empty for every path.
        is_file_server: whether it speaks WebDAV.
    """

    is_file_server = False

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

    def setfunc(self, func: Func | None) -> None:
        """Set `func`; None removes it (spec: bas-api §4). The name is that of the Lua method.

        Raises:
            ArgumentError: it can't be called.
        """
        if func is not None and not callable(func):
            raise ArgumentError(f"func: a function is needed, not {type(func).__name__}")
        self.func = func

    def setauth(self, authenticator: Authenticator | None = None, authorizer: Authorizer | None = None) -> None:
        """Let in only who is logged in, to the files and directories in it; `func` is asked before (spec: bas-api §4,
        runtime §5). In force at once, for requests that begin.

        Args:
            authenticator: asks for logins; None lets everybody in again.
            authorizer: says what they may do; None for everything.
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
        """Set which pages of other hosts may send to the addresses in it, and read. In force at once; without arguments
        it has no rules of its own any more. Args and raises: see `Cors`; an empty `origins` closes it to all.
        """
        rules = Cors(
            origins, methods=methods, headers=headers, expose=expose, credentials=credentials, max_age_s=max_age_s
        )
        has_any = bool(expose) or max_age_s != MAX_AGE_S or (origins, methods, headers, credentials) != (None,) * 4
        self._cors = rules if has_any else None
        _with_cors.add(self)

    def cors(self, relpath: str) -> Cors | None:
        """See `Branch.cors`."""
        return super().cors(relpath) or self._cors

    def file_servers(self, folder: str) -> Iterator[str]:
        """See `Branch.file_servers`."""
        inside = folder.startswith(self.prefix)
        if not inside and not self.prefix.startswith(folder):
            return
        rest, way = (folder[len(self.prefix) :], "") if inside else ("", self.prefix[len(folder) :])
        if self.is_file_server and not rest:
            yield way
        for further in super().file_servers(rest):
            yield way + further

    def refuse(self, request: Request) -> None:
        """Answer a request that the authorizer has refused."""
        request.response.error(403)

    def guards(self, relpath: str) -> Iterator[tuple[LoginGuard, str]]:
        """Yield the guards that a request for the hidden name `relpath` meets."""
        if self.guard is not None:
            yield self.guard, relpath
        yield from self._guards(self._children, relpath)

    def door(self, relpath: str) -> HiddenPathRoute | None:
        """Return the way for the hidden name `relpath` to a directory below that has rules of its own for such
        names."""
        door = self._open_door(self._children, relpath)
        if door is not None and self.guard is not None:
            door.guards.insert(0, (self.guard, relpath))
        return door

    def link(self, parent: Branch, siblings: list[Directory]) -> None:
        """Used by `insert`: take a place among `siblings`."""
        if self.parent is not None:
            raise ArgumentError(f"directory {self.name!r}: alreadyinserted; unlink it first")
        self.parent, self._siblings = parent, siblings
        siblings.append(self)
        siblings.sort(key=lambda child: (-child.priority, not child.name))

    def unlink(self) -> bool:
        """Take it out of the tree; return whether it was in one."""
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
        """Answer `request` for `relpath`, the rest of the path behind this directory; return whether that was done."""
        if self.func is not None and self._call(request, relpath):
            return True
        return self._own(request, relpath) or self._ask(self._children, request, relpath)

    def resources(self, request: Request, relpath: str) -> bool:
        """As `service`, but without asking `func`."""
        return self._own(request, relpath) or self._ask(self._children, request, relpath)

    def _call(self, request: Request, relpath: str) -> bool:
        """Ask `func`, unless it is running for this request: it does not get its own forwards back."""
        if self.func is None or self in request.running:
            return False
        outer = request.running
        request.running = (*outer, self)
        try:
            return self.func(request, relpath) is not False
        finally:
            request.running = outer

    def _own(self, request: Request, relpath: str) -> bool:
        return self.guard is not None and request.is_fresh and self.guard.stops(request, relpath)


class ResourceReader(Directory):
    """A directory that serves the files of an io.

    Args:
        name, priority: see `Directory`.
        io: the files.

    Attributes:
        headers: fields added to every answer that is no include.
        pages: runs a Lua Server Page: request, what was found, name in the io, this directory; None hides pages.
    """

    def __init__(self, name: str | None = None, priority: int = 0, *, io: Io) -> None:
        super().__init__(name, priority)
        self.io = io
        self.headers: dict[str, str] = {}
        self.pages: Pages | None = None
        self._checked: tuple[dict[str, str], Headers] = {}, Headers()
        self._prologues: list[Directory] = []
        self._files = StaticFiles(io)

    @property
    def _below(self) -> list[Directory]:
        return self._prologues + self._children

    def insertprolog(self, child: Directory) -> None:
        """Add a child that is asked before the files, by initial requests only. Raises as `insert`."""
        child.link(self, self._prologues)

    def guards(self, relpath: str) -> Iterator[tuple[LoginGuard, str]]:
        """See `Directory.guards`."""
        yield from self._guards(self._prologues, relpath)
        if not relpath.startswith(PUBLIC):
            yield from super().guards(relpath)

    def door(self, relpath: str) -> HiddenPathRoute | None:
        """See `Directory.door`."""
        door = self._open_door(self._prologues, relpath)  # the guard stands behind them
        return door or (
            self._open_door(self._children, relpath) if relpath.startswith(PUBLIC) else super().door(relpath)
        )

    def _own(self, request: Request, relpath: str) -> bool:
        if self._prologues and request.is_fresh and self._ask(self._prologues, request, relpath):
            return True
        if self.guard is not None and not relpath.startswith(PUBLIC) and super()._own(request, relpath):
            return True
        entry = self._find(relpath)
        if entry is None:
            return False
        if entry.is_page:
            return self._run(request, entry)
        self._files.serve(request, entry, self.headers)
        return True

    def _find(self, relpath: str) -> StaticFile | None:
        if relpath and not relpath.endswith("/"):
            return self._files.find(relpath)
        for index in _INDEX:
            entry = self._files.find(relpath + index)
            if entry is not None:
                return entry
        return None

    def _checked_headers(self) -> Headers:
        """`headers` as they go out: checked when they have changed, not for each page."""
        if self._checked[0] != self.headers:
            self._checked = dict(self.headers), Headers(self.headers)
        return self._checked[1]

    def _run(self, request: Request, entry: StaticFile) -> bool:
        if self.pages is None:
            return False
        if self.headers and not request.includes:
            request.response.headers.merge(self._checked_headers())
        self.pages(request, entry.stat, entry.name, self)
        return True


class Root(Branch):
    """The top of the tree: gets every request."""

    def cors(self, path: str) -> Cors | None:
        """See `Branch.cors`; for the path of a request."""
        return super().cors(_one_name(path)) if _with_cors else None

    def dispatch(self, request: Request) -> None:
        """Answer `request`: by the first directory that does, else 302 to the path with a slash, else 404."""
        path = _one_name(request.path)
        if request.method not in _REDIRECTED:
            path = self._path_of_file_server(request, path)
        if request.path == "*":
            request.response.status = 204
            request.response.headers.set("Allow", _ALLOW)
        elif hidden(path):
            self._hide(request, path)
        elif not self._ask(self._children, request, path):
            self._not_found(request)

    def _path_of_file_server(self, request: Request, path: str) -> str:
        """Return `path` with a slash if that is a file server's: programs don't follow a redirection there. The answer
        to OPTIONS tells of file servers below, where Windows looks for them before it asks for one.
        """
        folder = path if path.endswith("/") or not path else f"{path}/"
        ways = set(self.file_servers(folder))
        if request.method == "OPTIONS" and ways:
            request.response.finishers += (_tell_of_file_servers,)
        return folder if "" in ways else path

    def _hide(self, request: Request, path: str) -> None:
        """Answer 404; to who is not logged in, what any other name gets (spec: bas-api §17 A4). File servers have rules
        of their own."""
        is_plain = not _DOTS.intersection(path.split("/"))  # or an authorizer would not know "./a" for "a"
        door = self._open_door(self._children, path) if is_plain else None
        if door is not None:
            if not door.lets_in(request):
                request.response.error(404)
        elif not any(guard.stops(request, relpath) for guard, relpath in self._guards(self._children, path)):
            request.response.error(404)

    def internal(self, request: Request, path: str, base: Directory, mode: str) -> None:
        """Let another resource answer, as `response:forward`, `include` and `redirect` need it (spec: bas-api §2.2).

        Hidden names are allowed, except for "redirect". A directory function does not get the forwards it makes itself.

        Args:
            path: with a leading "/" from the root of the server, else from `base`.
            base: the directory that serves the caller.
            mode: "forward" (what was written is dropped, header fields stay), "include" (adds to it) or "redirect" (as
                forward, but searched like a new request, and with new header fields). Status and cookies always stay.

        Raises:
            DispatchError: nothing answers the path, too many in one another, or the response was committed before a
                forward. The response is as it was then.
        """
        response = request.response
        outer, draft = (request.includes, request.forwards, request.is_fresh), None
        request.is_fresh = mode == "redirect"
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
            request.includes, request.forwards, request.is_fresh = outer

    def _search(self, request: Request, path: str, base: Directory, mode: str) -> bool:
        normal = normalise(path)
        if normal is not None and not path.startswith("/"):
            return not (mode == "redirect" and hidden(normal)) and base.resources(request, normal)
        normal = normalise(path if path.startswith("/") else base.baseuri() + path)
        if normal is None or (mode == "redirect" and hidden(normal)):
            return False
        return self._ask(self._children, request, normal)

    def _not_found(self, request: Request) -> None:
        last = request.path.rpartition("/")[2]
        if _tell_of_file_servers in request.response.finishers:
            request.response.headers.set("Allow", _ALLOW)
            request.response.end()
            return
        if not last or ("." in last and "" not in self.file_servers(f"{_one_name(request.path)}/")):
            request.response.error(404)
            return
        path, mark, query = request.target.partition("?")
        scheme = "https" if request.secure else "http"
        request.response.redirect(f"{scheme}://{request.authority}{request.prefix}{path}/{mark}{query}")


def _tell_of_file_servers(fields: bytes) -> bytes:
    """Header lines with those of a file server, where it has not answered itself."""
    return with_missing_fields(fields, DAV_FIELDS)


def _one_name(path: str) -> str:
    """A path without its first slash, and without empty parts: one name for one thing, or a guard of "a/" would not see
    "//a/"."""
    return _SLASHES.sub("/", path)[1:] if "//" in path else path[1:]


def normalise(path: str) -> str | None:
    """Resolve "." and ".." of a path, without its leading slash; None when it leads above its beginning."""
    clean = normpath(path.lstrip("/"))
    if clean == ".." or clean.startswith("../"):
        return None
    clean = "" if clean == "." else clean
    return clean + "/" if path.endswith("/") and clean else clean
