"""Variables, file responses and threads for code of Python applications."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

from gevent import get_hub

from smqrt.errors import ArgumentError
from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from smqrt.http.resources import Io
from smqrt.http.static_files import StaticFiles
from smqrt.loop.threads import DedicatedThreads
from smqrt.process import current_process


class Namespace(MutableMapping[str, Any]):
    """The variables of `.preload.py`: `app["name"]` and `app.name` are the variable `name`.

    Args:
        variables: the variables themselves.
    """

    __slots__ = ("_variables",)
    _variables: dict[str, Any]

    def __init__(self, variables: dict[str, Any]) -> None:
        object.__setattr__(self, "_variables", variables)

    def __getitem__(self, name: str) -> Any:
        return self._variables[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._variables[name] = value

    def __delitem__(self, name: str) -> None:
        del self._variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._variables[name]
        except KeyError:
            raise AttributeError(f"the application defines no {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._variables[name] = value

    def __delattr__(self, name: str) -> None:
        if self._variables.pop(name, self) is self:
            raise AttributeError(f"the application defines no {name!r}")

    def __repr__(self) -> str:
        return f"<application with {', '.join(name for name in self if not name.startswith('__'))}>"


# ---- File responses

_MAX_READERS = 8
"""Folders of an application whose small files are cached; an application that creates an io for each request gains
nothing from the cache."""


def send_file(request: Request, name: str, io: Io | None = None, download_as: str | None = None) -> None:
    """Send a file as the response, with conditional requests, ranges and Content-Type like static files.

    Args:
        request: the request to answer.
        name: name of the file in `io`; it can't lead out of the folder, and private and hidden files are not found.
        io: the folder, for example `smqrt.http.disk.DiskIo("/var/photos")`; by default the application's folder.
        download_as: the name under which the browser saves the file; None lets the browser display it.

    Raises:
        HttpError: 404, there is no such file.
        ArgumentError: no `io` outside of an application.
    """
    scope = current_process.current_app.get()
    if io is None:
        io = scope.names.get("io") if scope else None  # type: ignore[assignment]
        if io is None:
            raise ArgumentError("io: required outside of a Python application")
    kept = scope.kept if scope else {}
    files = kept.pop(io, None)  # and inserted again, so that the first one is the least recently used
    if not isinstance(files, StaticFiles):
        files = StaticFiles(io)
    kept[io] = files
    if len(kept) > _MAX_READERS:
        del kept[next(iter(kept))]
    entry = files.find(name)
    if entry is None or entry.is_page:
        raise HttpError(404)
    fields = {}
    if download_as is not None:
        fields["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(download_as, safe='')}"
    files.serve(request, entry, fields)


# ---- Threads

THREADS = 8
"""Threads of all applications together. The server reads files in other threads, so that no application delays it."""
_POOL = "smqrt_application_threads"  # attribute of gevent's loop object that has the pool

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread. Blocks only the calling greenlet, until a thread is free and the function returns.

    Args:
        function: must not use objects of the event loop: requests, responses, hubs, sockets.
        args, kwargs: its arguments.

    Returns:
        The return value of the function.

    Raises:
        Exception: the exception of the function.
    """
    gevent_hub = get_hub()
    if not gevent_hub.loop.default:  # only the main thread has the default loop
        return function(*args, **kwargs)
    pool: DedicatedThreads | None = getattr(gevent_hub, _POOL, None)
    if pool is None:
        pool = DedicatedThreads(THREADS)
        setattr(gevent_hub, _POOL, pool)
    return pool.call(partial(function, *args, **kwargs))
